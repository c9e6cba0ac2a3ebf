"""GRPO for pass@k: only the best response of a group has an advantage, its lead over the second best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.config import at_least
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import are_equal, group_statistics


@ADVANTAGES.register
@dataclass(frozen=True)
class GRPOPassK:
    """Leave-one-out advantage of pass@k (arXiv:2503.19595).

    The advantage is what a response adds to the best reward of its group: best minus second best for the best one, 0
    for all others, optionally over the group's sample standard deviation. Groups whose two best rewards are equal but
    for rounding and groups of one get exactly 0; unscored responses are left out of the comparison and get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"group"})
    per_token: ClassVar[bool] = False

    normalize_by_std: bool = True  # divide by the group's standard deviation
    eps: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        at_least("eps", self.eps, 0)

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        is_scored = torch.isfinite(x.reward)
        reward = torch.where(is_scored, x.reward.double(), -torch.inf)
        index = torch.unique(x.group, return_inverse=True)[1]  # [B], 0 to G-1
        best = _largest(reward, index)
        is_best = is_scored & (reward == best[index])
        second = _largest(torch.where(is_best, -torch.inf, reward), index)
        num_best = torch.zeros_like(best).index_add(0, index, is_best.double())
        has_gain = (num_best == 1) & second.isfinite() & ~are_equal(second, best)  # [G]
        gain = torch.where(has_gain, best - second, 0.0)[index]
        if self.normalize_by_std:
            gain = gain / (group_statistics(x.reward, x.group, is_scored).std + self.eps)
        return torch.where(is_best & has_gain[index], gain, 0.0)


def _largest(value: Tensor, group: Tensor) -> Tensor:
    """[B] values and group numbers -> [G] largest value of each group."""
    num_groups = int(group.max()) + 1 if len(group) else 0
    return torch.full((num_groups,), -torch.inf, dtype=value.dtype).scatter_reduce(0, group, value, "amax")
