"""ReMax: reward minus that of the greedy response to the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.types import AdvantageInputs


@ADVANTAGES.register
@dataclass(frozen=True)
class ReMax:
    """ReMax (arXiv:2310.10505): reward - reward of the greedy response of the same policy to the same prompt.

    It needs no groups, but one more response per prompt. Unscored responses, and responses with an unscored baseline,
    get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"baseline"})
    per_token: ClassVar[bool] = False

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        assert x.baseline is not None, "remax needs baseline"
        advantage = x.reward.double() - x.baseline.double()
        return torch.where(torch.isfinite(advantage), advantage, 0.0)
