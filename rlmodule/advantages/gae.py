"""GAE: advantages per token from a value function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.config import at_least, at_most, more_than
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import whiten
from rlmodule.ops.value import lambda_advantages


@ADVANTAGES.register
@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation (arXiv:1506.02438).

    The reward is on the last loss token, per-token penalties (KL) are on their tokens. Unscored responses are left out
    of whitening and get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})
    per_token: ClassVar[bool] = True

    gamma: float = 1.0  # discount per loss token
    lam: float = 0.95  # 0: one-step TD errors; 1: Monte-Carlo returns minus values
    whiten: bool = True  # mean 0 and variance 1 over the loss tokens of all data ranks
    bootstrap_truncated: bool = False  # add the value after a truncated response; false: it is terminal

    def __post_init__(self) -> None:
        more_than("gamma", self.gamma, 0)
        at_most("gamma", self.gamma, 1)
        at_least("lam", self.lam, 0)
        at_most("lam", self.lam, 1)

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration and [N] values -> [N] float64 advantages."""
        is_scored = _is_scored(x)
        advantage = torch.where(is_scored, self._advantage(x), 0.0)
        return torch.where(is_scored, whiten(advantage, is_scored), 0.0) if self.whiten else advantage

    def returns(self, x: AdvantageInputs) -> Tensor:
        """[N] float64 targets of the value function: value plus advantage before whitening."""
        assert x.tokens is not None, "gae needs values"
        return torch.where(_is_scored(x), x.tokens.value + self._advantage(x), 0.0)

    def _advantage(self, x: AdvantageInputs) -> Tensor:
        assert x.tokens is not None, "gae needs values"
        next_value = x.tokens.next_value if self.bootstrap_truncated else torch.zeros_like(x.tokens.next_value)
        reward = -x.tokens.penalty
        has_tokens = x.loss_tokens > 0
        reward[(x.loss_tokens.cumsum(0) - 1)[has_tokens]] += x.reward[has_tokens].double()
        return lambda_advantages(reward, x.tokens.value, next_value, x.loss_tokens, gamma=self.gamma, lam=self.lam)


def _is_scored(x: AdvantageInputs) -> Tensor:
    return torch.isfinite(x.reward).repeat_interleave(x.loss_tokens)
