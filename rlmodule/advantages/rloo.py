"""RLOO: reward minus the mean of the other responses to the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import group_statistics


@ADVANTAGES.register
@dataclass(frozen=True)
class RLOO:
    """Leave-one-out baseline, n/(n-1) * (reward - group mean) (arXiv:2402.14740).

    Groups of equal rewards and groups of one get exactly 0; unscored responses are left out of the statistics and
    get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"group"})
    per_token: ClassVar[bool] = False

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        is_scored = torch.isfinite(x.reward)
        group = group_statistics(x.reward, x.group, is_scored)
        leave_one_out = group.count / (group.count - 1).clamp(min=1) * (x.reward.double() - group.mean)
        return torch.where(is_scored & ~group.has_zero_std, leave_one_out, 0.0)
