"""MaxRL: reward minus group mean, over the group mean."""

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
class MaxRL:
    """Maximum-likelihood reinforcement learning (arXiv:2602.02710): (reward - group mean) / group mean.

    Dividing by the success rate turns the gradient of the expected reward into that of its logarithm, so hard prompts
    count more. It is meant for rewards of 0 or more: a group whose mean is not positive gets 0. Groups of equal rewards
    and groups of one get exactly 0; unscored responses are left out of the statistics and get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"group"})
    per_token: ClassVar[bool] = False

    eps: float = 1e-6  # added to the mean

    def __post_init__(self) -> None:
        at_least("eps", self.eps, 0)

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        is_scored = torch.isfinite(x.reward)
        group = group_statistics(x.reward, x.group, is_scored)
        relative = (x.reward.double() - group.mean) / (group.mean.clamp(min=0) + self.eps)
        return torch.where(is_scored & ~group.has_zero_std & (group.mean > 0), relative, 0.0)
