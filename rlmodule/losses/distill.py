"""On-policy distillation: a student answers, a frozen teacher says how likely it would have been to say the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlmodule.core.config import at_least
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.kl import importance_ratio


@LOSSES.register
@dataclass(frozen=True)
class Distill:
    """Clipped surrogate with an advantage per token, A = -(log p_student - log p_teacher), p_student at the start.

    In the first update of an iteration the expected gradient is that of KL(student || teacher) of the next token, at
    prefixes that the student itself came to (arXiv:2306.13649, generalised knowledge distillation with reverse KL and
    the student's own samples). A falls on each token alone: what it leads to later is not charged to it.

    Metrics: ``teacher_kl`` log p_student - log p_teacher at the start in nats, whose mean estimates the reverse KL per
    token; ``clip_frac`` tokens held back by the range; ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "teacher_logprob"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = False

    clip_ratio_low: float = 0.2  # ratio floor is 1 - clip_ratio_low
    clip_ratio_high: float = 0.2  # ratio ceiling is 1 + clip_ratio_high

    def __post_init__(self) -> None:
        at_least("clip_ratio_low", self.clip_ratio_low, 0)
        at_least("clip_ratio_high", self.clip_ratio_high, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "distill needs old_logprob"
        assert x.teacher_logprob is not None, "distill needs teacher_logprob"
        advantage = x.teacher_logprob - x.old_logprob
        ratio = importance_ratio(x.logprob, x.old_logprob)
        plain = ratio * advantage
        gain = torch.minimum(plain, ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high) * advantage)
        metrics = {
            "teacher_kl": -advantage,
            "clip_frac": (gain < plain).float(),
            "ppo_kl": (x.old_logprob - x.logprob).detach(),
        }
        return TokenLoss(loss=-gain, metrics=metrics)
