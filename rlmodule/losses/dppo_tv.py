"""A trust region in probability, not in ratio: total variation between the policies, as the taken token shows it."""

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
    """Divergence PPO (arXiv:2602.04879), for any measure of how far the taken token has moved.

    With p and q the probability of the taken token now and then, the loss is ``-stop(min(p/q, c)) * A * logprob``,
    and 0 once an update in A's direction has used its room. A token that moved the other way is free to come back.

    Metrics: ``clip_frac`` tokens outside their room, ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = True

    divergence_low: float  # room of a probability to fall
    divergence_high: float  # room of a probability to rise
    max_ratio: float = 20.0  # largest importance weight

    def __post_init__(self) -> None:
        at_least("divergence_low", self.divergence_low, 0)
        at_least("divergence_high", self.divergence_high, 0)
        at_least("max_ratio", self.max_ratio, 1)

    @abstractmethod
    def divergence(self, now: Tensor, old: Tensor) -> Tensor:
        """[N] log-probabilities now and then -> [N] how far apart, whichever way."""

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "the ratio is to old_logprob"
        assert x.advantage is not None, "the loss is of an advantage"
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
    """Binary total variation, |p - q|: a rare token may grow many times over, a frequent one may not fall by a tenth.

    Settings and metrics: as in ``DPPO``.
    """

    divergence_low: float = 0.15  # room of a probability to fall
    divergence_high: float = 0.15  # room of a probability to rise

    def divergence(self, now: Tensor, old: Tensor) -> Tensor:
        """[N] log-probabilities now and then -> [N] difference of the probabilities."""
        return (now.exp() - old.exp()).abs()
