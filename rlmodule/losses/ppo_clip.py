"""PPO: the clipped surrogate, with separate lower and upper range (DAPO) and an optional dual clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlmodule.core.config import at_least, more_than
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.kl import importance_ratio


@LOSSES.register
@dataclass(frozen=True)
class PPOClip:
    """Pessimistic clipped surrogate per token (arXiv:1707.06347); dual clip as in arXiv:1912.09729.

    Metrics: ``clip_frac`` tokens clipped by the range, ``clip_frac_lower`` tokens clipped by the dual clip,
    ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = True

    clip_ratio_low: float = 0.2  # lower bound of the ratio is 1 - clip_ratio_low
    clip_ratio_high: float = 0.2  # upper bound of the ratio is 1 + clip_ratio_high
    clip_ratio_c: float | None = None  # dual clip: largest ratio where A < 0, above 1; None for none

    def __post_init__(self) -> None:
        at_least("clip_ratio_low", self.clip_ratio_low, 0)
        at_least("clip_ratio_high", self.clip_ratio_high, 0)
        if self.clip_ratio_c is not None:
            more_than("clip_ratio_c", self.clip_ratio_c, 1)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "ppo_clip needs old_logprob"
        assert x.advantage is not None, "ppo_clip needs advantage"
        ratio = importance_ratio(x.logprob, x.old_logprob)
        plain = ratio * x.advantage
        gain = torch.minimum(plain, ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high) * x.advantage)
        metrics = {"clip_frac": (gain < plain).float(), "ppo_kl": (x.old_logprob - x.logprob).detach()}
        if self.clip_ratio_c is not None:
            floor = self.clip_ratio_c * x.advantage
            is_below = (x.advantage < 0) & (gain < floor)
            gain = torch.where(is_below, floor, gain)
            metrics["clip_frac_lower"] = is_below.float()
        return TokenLoss(loss=-gain, metrics=metrics)
