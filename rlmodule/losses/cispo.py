"""CISPO: the importance weight is clipped, and every token keeps its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.config import at_least
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.kl import importance_ratio


@LOSSES.register
@dataclass(frozen=True)
class CISPO:
    """Clipped importance-sampling policy optimisation (MiniMax-M1, arXiv:2506.13585).

    Loss ``-stop_gradient(clip(ratio, 1 - low, 1 + high)) * A * logprob``: a weighted policy gradient that drops no
    token. The paper has no lower bound of the weight (``clip_ratio_low=1``); the upper bound of 5 is that of
    arXiv:2510.13786.

    Metrics: ``clip_frac`` tokens with a clipped weight, ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = True

    clip_ratio_low: float = 1.0  # lower bound of the weight is 1 - clip_ratio_low
    clip_ratio_high: float = 4.0  # upper bound of the weight is 1 + clip_ratio_high

    def __post_init__(self) -> None:
        at_least("clip_ratio_low", self.clip_ratio_low, 0)
        at_least("clip_ratio_high", self.clip_ratio_high, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "cispo needs old_logprob"
        assert x.advantage is not None, "cispo needs advantage"
        ratio = importance_ratio(x.logprob.detach(), x.old_logprob)
        weight = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        return TokenLoss(
            loss=-weight * x.advantage * x.logprob,
            metrics={"clip_frac": (weight != ratio).float(), "ppo_kl": x.old_logprob - x.logprob.detach()},
        )
