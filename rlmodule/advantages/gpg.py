"""GPG: reward minus group mean, scaled up for the groups without reward variance."""

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

    alpha * (reward - group mean) / f_norm with alpha = scored responses over scored responses in groups with reward
    variance. Groups of equal rewards have no gradient but count in the denominator of the mean; alpha compensates for
    them. They and groups of one get exactly 0; unscored responses are left out of the statistics and get 0.
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
        has_gradient = is_scored & ~group.has_zero_std
        alpha = is_scored.sum().double() / has_gradient.sum().clamp(min=1)
        return torch.where(has_gradient, alpha * (x.reward.double() - group.mean) / self.f_norm, 0.0)
