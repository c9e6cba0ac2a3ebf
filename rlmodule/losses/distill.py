"""On-policy distillation: a frozen teacher scores the tokens that the student sampled."""

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
    """Clipped surrogate with the advantage A = log p_teacher - log p_student of each token.

    p_student is that of the policy that starts the update. In the first update of an iteration the expected gradient
    is that of KL(student || teacher) of the next token, at prefixes that the student sampled (arXiv:2306.13649:
    generalised knowledge distillation with reverse KL and on-policy samples). The advantage of a token does not include
    the divergence at later tokens.

    Metrics: ``teacher_kl`` -A in nats, whose mean estimates the reverse KL per token; ``clip_frac`` clipped tokens;
    ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "teacher_logprob"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = False

    clip_ratio_low: float = 0.2  # lower bound of the ratio is 1 - clip_ratio_low
    clip_ratio_high: float = 0.2  # upper bound of the ratio is 1 + clip_ratio_high

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
