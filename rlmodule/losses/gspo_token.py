"""GSPO for advantages that differ within a response: value of the sequence ratio, gradient of the token."""

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

    The ratio of token t is ``stop(s) * p_t / stop(p_t)``, with s as in ``gspo``: its value is the sequence's, its
    gradient stays on token t. With one advantage per response loss and gradient equal those of ``gspo``.

    Settings and metrics: as in ``gspo``.
    """

    def ratio(self, x: LossInputs, log_ratio: Tensor) -> Tensor:
        """[N] logprob - old_logprob -> [N] the ratio of each token's whole response, with the token's own gradient."""
        # logprob - its own value is 0 and carries the gradient of the token.
        return bounded_exp(x.mean_per_sequence(log_ratio.detach()) + (x.logprob - x.logprob.detach()))
