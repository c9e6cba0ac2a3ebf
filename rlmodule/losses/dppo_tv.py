"""Divergence PPO with binary total variation: the trust region is a change of probability, not of the ratio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.core.config import at_least
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.kl import importance_ratio


@dataclass(frozen=True)
class DPPO(ABC):
    """Divergence PPO (arXiv:2602.04879), for any divergence that the probability of the taken token gives.

    With p and q the new and old probability of the taken token and c ``max_ratio``, the loss is
    ``-stop_gradient(min(p/q, c)) * A * logprob``. It is 0 for a token that has moved in the direction of its advantage
    by more than the allowed divergence; a token that moved the other way keeps its gradient.

    Metrics: ``clip_frac`` tokens outside the trust region, ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = True

    divergence_low: float  # largest divergence of a token whose probability falls
    divergence_high: float  # largest divergence of a token whose probability rises
    max_ratio: float = 20.0  # largest importance weight

    def __post_init__(self) -> None:
        at_least("divergence_low", self.divergence_low, 0)
        at_least("divergence_high", self.divergence_high, 0)
        at_least("max_ratio", self.max_ratio, 1)

    @abstractmethod
    def divergence(self, now: Tensor, old: Tensor) -> Tensor:
        """[N] new and old log-probabilities -> [N] divergence, at least 0."""

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "dppo needs old_logprob"
        assert x.advantage is not None, "dppo needs advantage"
        now = x.logprob.detach()
        weight = importance_ratio(now, x.old_logprob).clamp(max=self.max_ratio)
        divergence = self.divergence(now, x.old_logprob)
        may_rise = (now <= x.old_logprob) | (divergence <= self.divergence_high)
        may_fall = (now >= x.old_logprob) | (divergence <= self.divergence_low)
        is_inside = torch.where(x.advantage > 0, may_rise, may_fall)
        loss = torch.where(is_inside, -weight * x.advantage * x.logprob, 0.0)
        return TokenLoss(loss=loss, metrics={"clip_frac": (~is_inside).float(), "ppo_kl": x.old_logprob - now})


@LOSSES.register
@dataclass(frozen=True)
class DPPOTotalVariation(DPPO):
    """Binary total variation, |p - q|: a rare token may become many times likelier, a frequent one may change little.

    Settings and metrics: as in ``DPPO``.
    """

    divergence_low: float = 0.15  # largest fall of a probability
    divergence_high: float = 0.15  # largest rise of a probability

    def divergence(self, now: Tensor, old: Tensor) -> Tensor:
        """[N] new and old log-probabilities -> [N] difference of the probabilities."""
        return (now.exp() - old.exp()).abs()
