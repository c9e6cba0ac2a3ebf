"""Reward minus group mean, scaled up for the groups that say nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.config import more_than
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import group_statistics


@ADVANTAGES.register
@dataclass(frozen=True)
class GPG:
    """Group policy gradient (arXiv:2504.02546).

    alpha * (reward - group mean) / f_norm with alpha = scored responses over scored responses in groups that are not
    flat: flat groups have no gradient but stand in the denominators, and alpha makes up for them. Flat groups and
    groups of one give exactly 0; unscored responses leave the statistics and get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"group"})
    per_token: ClassVar[bool] = False

    f_norm: float = 1.0  # constant divisor

    def __post_init__(self) -> None:
        more_than("f_norm", self.f_norm, 0)

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        is_scored = torch.isfinite(x.reward)
        group = group_statistics(x.reward, x.group, is_scored)
        tells = is_scored & ~group.has_zero_std
        alpha = is_scored.sum().double() / tells.sum().clamp(min=1)
        return torch.where(tells, alpha * (x.reward.double() - group.mean) / self.f_norm, 0.0)
