"""GRPO: the reward normalised within its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.config import at_least, one_of
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import group_statistics


@ADVANTAGES.register
@dataclass(frozen=True)
class GRPO:
    """Reward minus group mean, over the group's sample standard deviation (arXiv:2402.03300).

    Without the division it is the mean-centred estimator of Dr. GRPO (arXiv:2503.20783). ``std_over=batch`` divides by
    the standard deviation of the rewards of the whole iteration instead (arXiv:2508.08221), because small groups
    estimate a standard deviation badly. Groups of equal rewards and groups of one get exactly 0; unscored responses are
    left out of the statistics and get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"group"})
    per_token: ClassVar[bool] = False

    normalize_by_std: bool = True  # divide by a standard deviation
    std_over: str = "group"  # of which rewards: group, or batch (all scored responses of the iteration)
    eps: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        at_least("eps", self.eps, 0)
        one_of("std_over", self.std_over, ("group", "batch"))

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        is_scored = torch.isfinite(x.reward)
        group = group_statistics(x.reward, x.group, is_scored)
        advantage = x.reward.double() - group.mean
        if self.normalize_by_std:
            over = group
            if self.std_over == "batch":
                over = group_statistics(x.reward, torch.zeros_like(x.group), is_scored)
            advantage = advantage / (over.std + self.eps)
        return torch.where(is_scored & ~group.has_zero_std, advantage, 0.0)
