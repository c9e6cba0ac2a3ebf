"""REINFORCE++-baseline: reward minus group mean, whitened over all tokens of the iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import group_statistics, whiten_by_tokens


@ADVANTAGES.register
@dataclass(frozen=True)
class ReinforcePPBaseline:
    """REINFORCE++ with a group baseline (arXiv:2501.03262).

    Rewards are centred by group; mean and variance of whitening are over the loss tokens of all data ranks, whose
    lengths every rank knows. Groups of equal rewards and groups of one count as 0 in these and get exactly 0; unscored
    responses are left out of the statistics and get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"group"})
    per_token: ClassVar[bool] = False

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        is_scored = torch.isfinite(x.reward)
        group = group_statistics(x.reward, x.group, is_scored)
        centred = torch.where(group.has_zero_std, 0.0, x.reward.double() - group.mean)
        whitened = whiten_by_tokens(centred, x.loss_tokens, is_scored)
        return torch.where(is_scored & ~group.has_zero_std, whitened, 0.0)
