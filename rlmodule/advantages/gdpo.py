"""GDPO: every component of the reward is normalised separately, then they are added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import ROUNDING, group_statistics


@ADVANTAGES.register
@dataclass(frozen=True)
class GDPO:
    """Group reward-decoupled normalisation (arXiv:2601.05242).

    Per component: (value - group mean) / (group standard deviation + eps). The weighted sum of the components is
    divided by its standard deviation over all scored responses of the iteration. If components were added first, as
    GRPO does, many different combinations would get the same advantage. A missing component adds 0; a reward without
    components counts as one component. Groups without variance in any component get exactly 0; unscored responses
    get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"group", "parts"})
    per_token: ClassVar[bool] = False

    weights: dict[str, float] = field(default_factory=dict)  # component -> weight; empty for all components, 1 each
    eps: float = 1e-6  # added to standard deviations

    def __post_init__(self) -> None:
        at_least("eps", self.eps, 0)

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [B] float64 advantages."""
        is_scored = torch.isfinite(x.reward)
        parts = x.parts or {"reward": x.reward}
        # One that is weighed and absent may come in another iteration; beside one that nobody weighs it is misspelt.
        unknown, unweighed = sorted(set(self.weights) - set(parts)), set(parts) - set(self.weights)
        if unknown and unweighed and len(x.reward):
            raise ConfigError(
                key="advantage.weights",
                got=unknown[0],
                because="the reward has no such component",
                fix=did_you_mean(unknown[0], parts),
            )
        total = torch.zeros_like(x.reward, dtype=torch.float64)
        size = torch.zeros_like(total)  # of the largest part
        for name in sorted(set(self.weights or parts) & set(parts)):
            has = is_scored & torch.isfinite(parts[name])
            group = group_statistics(parts[name], x.group, has)
            relative = (parts[name].double() - group.mean) / (group.std + self.eps)
            part = self.weights.get(name, 1.0) * torch.where(has & ~group.has_zero_std, relative, 0.0)
            total, size = total + part, torch.maximum(size, part.abs())
        total = torch.where(total.abs() > ROUNDING * size, total, 0.0)  # parts that cancel leave rounding
        whole = group_statistics(total, torch.zeros_like(x.group), is_scored)
        return torch.where(is_scored & (total != 0), total / (whole.std + self.eps), 0.0)
