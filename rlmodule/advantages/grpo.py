"""Reward relative to the other answers to the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.config import at_least
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import group_statistics


@ADVANTAGES.register
@dataclass(frozen=True)
class GRPO:
    """Reward minus group mean, over the group's sample standard deviation (arXiv:2402.03300).

    Without the division it is the mean-centred estimator of Dr. GRPO (arXiv:2503.20783). Flat groups and groups of one
    give exactly 0; unscored responses leave the statistics and get 0.
    """

    needs_group: ClassVar[bool] = True

    normalize_by_std: bool = True  # divide by the group's standard deviation
    eps: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        at_least("eps", self.eps, 0)

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        is_scored = torch.isfinite(x.reward)
        group = group_statistics(x.reward, x.group, is_scored)
        advantage = x.reward.double() - group.mean
        if self.normalize_by_std:
            advantage = advantage / (group.std + self.eps)
        return torch.where(is_scored & ~group.is_flat, advantage, 0.0)
