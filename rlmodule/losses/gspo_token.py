"""GSPO-token: the sequence ratio with the gradient of the token, for advantages that differ within a response."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlmodule.core.types import LossInputs
from rlmodule.losses import LOSSES
from rlmodule.losses.gspo import GSPO
from rlmodule.ops.kl import bounded_exp


@LOSSES.register
@dataclass(frozen=True)
class GSPOToken(GSPO):
    """The token variant of group sequence policy optimisation (arXiv:2507.18071, section 4.3).

    The ratio of token t is ``stop_gradient(s) * p_t / stop_gradient(p_t)`` with s as in ``gspo``: the value of the
    sequence ratio, with the gradient of token t alone. With one advantage per response, loss and gradient equal those
    of ``gspo``.

    Settings and metrics: as in ``gspo``.
    """

    def ratio(self, x: LossInputs, log_ratio: Tensor) -> Tensor:
        """[N] logprob - old_logprob -> [N] ratio of the response, with the gradient of the token."""
        # logprob - logprob.detach() is 0 and has the gradient of logprob.
        return bounded_exp(x.mean_per_sequence(log_ratio.detach()) + (x.logprob - x.logprob.detach()))
