"""A trust region in divergence, not in ratio: KL between the policies, as the taken token shows it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlmodule.losses import LOSSES
from rlmodule.losses.dppo_tv import DPPO
from rlmodule.ops.kl import binary_kl


@LOSSES.register
@dataclass(frozen=True)
class DPPOKL(DPPO):
    """Binary KL: KL(then || now) of "this token or another".

    Settings and metrics: as in ``DPPO``.
    """

    divergence_low: float = 0.05  # room of a probability to fall, nats
    divergence_high: float = 0.05  # room of a probability to rise, nats

    def divergence(self, now: Tensor, old: Tensor) -> Tensor:
        """[N] log-probabilities now and then -> [N] nats."""
        return binary_kl(old, now)
