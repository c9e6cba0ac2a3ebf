"""GMPO: the geometric mean of the clipped token ratios of a response."""

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
class GMPO:
    """Geometric-mean policy optimisation (arXiv:2507.20673).

    With d = logprob - old_logprob and A the mean advantage of the response, each d is clipped pessimistically, as in
    PPO: to at most ``high`` if A >= 0, to at least ``-low`` otherwise. Every token has the loss
    ``-A exp(mean of clipped d)``. Clipped tokens have no gradient. The paper uses ``seq-mean-token-mean``.

    Metrics: ``clip_frac`` clipped tokens, ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = True
    zero_at_zero_advantage: ClassVar[bool] = True

    clip_log_ratio_low: float = 0.4  # lower bound of a log-ratio is -clip_log_ratio_low, nats
    clip_log_ratio_high: float = 0.4  # upper bound of a log-ratio, nats

    def __post_init__(self) -> None:
        at_least("clip_log_ratio_low", self.clip_log_ratio_low, 0)
        at_least("clip_log_ratio_high", self.clip_log_ratio_high, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "gmpo needs old_logprob"
        assert x.advantage is not None, "gmpo needs advantage"
        advantage = x.mean_per_sequence(x.advantage)
        log_ratio = x.logprob - x.old_logprob
        clipped = log_ratio.clamp(-self.clip_log_ratio_low, self.clip_log_ratio_high)
        lower, upper = torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
        pessimistic = torch.where(advantage >= 0, lower, upper)
        ratio = bounded_exp(x.mean_per_sequence(pessimistic))
        return TokenLoss(
            loss=-advantage * ratio,
            metrics={"clip_frac": (pessimistic != log_ratio).float(), "ppo_kl": -log_ratio.detach()},
        )
