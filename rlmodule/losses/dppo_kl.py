"""Divergence PPO with binary KL: the trust region is a KL divergence instead of a range of the ratio."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlmodule.losses import LOSSES
from rlmodule.losses.dppo_tv import DPPO
from rlmodule.ops.kl import binary_kl


@LOSSES.register
@dataclass(frozen=True)
class DPPOKL(DPPO):
    """Binary KL: KL(old || new) of the distribution "this token, or any other".

    Settings and metrics: as in ``DPPO``.
    """

    divergence_low: float = 0.05  # largest divergence of a token whose probability falls, nats
    divergence_high: float = 0.05  # largest divergence of a token whose probability rises, nats

    def divergence(self, now: Tensor, old: Tensor) -> Tensor:
        """[N] new and old log-probabilities -> [N] nats."""
        return binary_kl(old, now)
