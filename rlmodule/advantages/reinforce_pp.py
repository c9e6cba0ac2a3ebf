"""REINFORCE++: discounted returns per token, whitened over the iteration; needs no groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import whiten


@ADVANTAGES.register
@dataclass(frozen=True)
class ReinforcePP:
    """REINFORCE++ (arXiv:2501.03262).

    The reward is on the last loss token, so a token followed by k loss tokens has the return gamma^k * reward; tool and
    observation tokens in between do not discount. Returns are whitened over the loss tokens of all data ranks.
    Unscored responses are left out of the statistics and get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    per_token: ClassVar[bool] = True

    gamma: float = 1.0  # discount per loss token

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ConfigError(key="gamma", got=self.gamma, because="must be above 0 and at most 1", fix="Use gamma=1.0")

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> [N] float64 advantages."""
        is_scored = torch.isfinite(x.reward).repeat_interleave(x.loss_tokens)  # [N]
        ends = x.loss_tokens.cumsum(0).repeat_interleave(x.loss_tokens)  # [N]
        remaining = ends - 1 - torch.arange(len(ends), device=ends.device)
        reward = x.reward.double().repeat_interleave(x.loss_tokens)
        returns = torch.where(is_scored, self.gamma ** remaining.double() * reward, 0.0)
        return torch.where(is_scored, whiten(returns, is_scored), 0.0)
