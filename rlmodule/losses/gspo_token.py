"""GSPO for advantages that differ within a response: value of the sequence ratio, gradient of the token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlmodule.core.config import at_least
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.kl import bounded_exp


@LOSSES.register
@dataclass(frozen=True)
class GSPOToken:
    """The token variant of group sequence policy optimisation (arXiv:2507.18071, section 4.3).

    The ratio of token t is ``stop(s) * p_t / stop(p_t)``, with s as in ``gspo``: its value is the sequence's, its
    gradient stays on token t. With one advantage per response loss and gradient equal those of ``gspo``.

    Metrics: as in ``gspo``.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = True
    zero_at_zero_advantage: ClassVar[bool] = True

    clip_ratio_low: float = 3e-4  # floor of the sequence ratio is 1 - clip_ratio_low
    clip_ratio_high: float = 4e-4  # ceiling of the sequence ratio is 1 + clip_ratio_high

    def __post_init__(self) -> None:
        at_least("clip_ratio_low", self.clip_ratio_low, 0)
        at_least("clip_ratio_high", self.clip_ratio_high, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "gspo_token needs old_logprob"
        assert x.advantage is not None, "gspo_token needs advantage"
        log_ratio = x.logprob.detach() - x.old_logprob
        of_sequence = x.mean_per_sequence(log_ratio)
        # logprob - its own value is 0 and carries the gradient of the token.
        ratio = bounded_exp(of_sequence + (x.logprob - x.logprob.detach()))
        plain = ratio * x.advantage
        gain = torch.minimum(plain, ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high) * x.advantage)
        return TokenLoss(loss=-gain, metrics={"clip_frac": (gain < plain).float(), "ppo_kl": -log_ratio})
