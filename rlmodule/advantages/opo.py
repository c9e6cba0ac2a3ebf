"""OPO: reward minus the length-weighted mean of its group."""

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
class OPO:
    """On-policy optimal baseline (arXiv:2505.23585): sum(length * reward) / sum(length) over the group, in loss tokens.

    This baseline has the least variance if the squared gradient norm of a response is proportional to its length.
    Groups of equal rewards and groups of one get exactly 0; unscored responses are left out of the statistics and
    get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"group"})
    per_token: ClassVar[bool] = False

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        is_scored = torch.isfinite(x.reward)
        length = x.loss_tokens.double()
        weighted = group_statistics(x.reward * length, x.group, is_scored).mean
        baseline = weighted / group_statistics(length, x.group, is_scored).mean.clamp(min=1e-9)
        has_zero_std = group_statistics(x.reward, x.group, is_scored).has_zero_std
        return torch.where(is_scored & ~has_zero_std, x.reward.double() - baseline, 0.0)
