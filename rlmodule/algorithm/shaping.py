"""Reward shaping between the reward function and the advantage: group filter, overlong penalty, KL in the reward.

Only advantages see the shaped reward. The unshaped reward is logged, and decides whether a group is filtered out. The
callers are in ``experience/``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.ops.kl import ESTIMATORS
from rlmodule.ops.masked import group_statistics

# Of the KL coefficient from one iteration to the next. With more than 5 horizons of responses the formula gives 0, from
# which nothing comes back, or less, which would reward KL.
LEAST_FACTOR = 0.1


@dataclass(frozen=True)
class FilterGroups:
    """Dynamic sampling (DAPO, arXiv:2503.14476): groups of equal rewards are replaced by newly sampled ones."""

    enable: bool = False  # drop groups of equal rewards and sample more prompts
    max_num_gen_batches: int = 10  # most rounds of sampling per iteration; then it trains on the groups it has

    def __post_init__(self) -> None:
        at_least("filter_groups.max_num_gen_batches", self.max_num_gen_batches, 1)


def has_reward_variance(reward: Tensor, group: Tensor) -> Tensor:
    """[B] bool, whether rewards of a response's group differ by more than rounding; ``reward`` [B], NaN if unscored."""
    return ~group_statistics(reward, group, torch.isfinite(reward)).has_zero_std


@dataclass(frozen=True)
class OverlongBuffer:
    """Soft overlong penalty (DAPO, arXiv:2503.14476, equation 13)."""

    enable: bool = False  # penalise responses that come close to the limit
    length: int | None = None  # tokens before the limit over which the penalty grows; None: a fifth of the limit
    penalty_factor: float = 1.0  # penalty at the limit
    max_length: int | None = None  # the limit in tokens; rollout.max_response_length

    def __post_init__(self) -> None:
        at_least("overlong_buffer.penalty_factor", self.penalty_factor, 0)
        if self.length is not None:
            at_least("overlong_buffer.length", self.length, 1)
        if self.enable and self.max_length is None:
            raise ConfigError(
                key="overlong_buffer.max_length",
                got=None,
                because="the penalty grows towards a limit",
                fix="Use ${rollout.max_response_length}",
            )
        if self.enable and self.start < 0:
            raise ConfigError(
                key="overlong_buffer.length",
                got=self.length,
                because=f"it is the last part of a response of at most max_length={self.max_length} tokens",
                fix=f"Use overlong_buffer.length={self.max_length} or less",
            )

    @property
    def width(self) -> int:
        """Tokens over which the penalty grows; the default is a fifth of the limit, as in the paper."""
        return max(1, (self.max_length or 0) // 5) if self.length is None else self.length

    @property
    def start(self) -> int:
        """Tokens of the longest response without penalty."""
        return (self.max_length or 0) - self.width


def overlong_penalty(response_len: Tensor, config: OverlongBuffer) -> Tensor:
    """[B] tokens that each response drew -> [B] float64: 0 before the buffer, then linear up to ``penalty_factor``."""
    if not config.enable:
        return torch.zeros_like(response_len, dtype=torch.float64)
    inside = (response_len.double() - config.start) / config.width
    return config.penalty_factor * inside.clamp(0, 1)


@dataclass(frozen=True)
class KLInReward:
    """KL penalty in the reward: coef times the sum of the response's per-token KL estimates, in nats."""

    coef: float = 0.001  # reward subtracted per nat; initial value of the adaptive controller
    estimator: str = "k1"  # k1, abs, k2 or k3; in a reward only the value matters, and k1 is unbiased
    controller: str = "fixed"  # fixed, or adaptive: adjust coef so that the KL approaches target
    target: float = 6.0  # KL per response that the adaptive controller aims at, nats
    horizon: float = 10000.0  # time constant of the adaptive controller, responses

    def __post_init__(self) -> None:
        at_least("kl_in_reward.coef", self.coef, 0)
        one_of("kl_in_reward.estimator", self.estimator, ESTIMATORS)
        one_of("kl_in_reward.controller", self.controller, ("fixed", "adaptive"))
        more_than("kl_in_reward.target", self.target, 0)
        more_than("kl_in_reward.horizon", self.horizon, 0)


@dataclass
class KLController:
    """The KL coefficient during training (arXiv:1909.08593, section 2.2); its state is in checkpoints."""

    config: KLInReward
    coef: float = field(init=False)

    def __post_init__(self) -> None:
        self.coef = self.config.coef

    def update(self, kl: float, num_responses: int) -> None:
        """Adjust the coefficient after ``num_responses`` responses of mean KL ``kl``.

        Its relative change is at most ``0.2 * num_responses / horizon``, so a single unusual batch has little effect,
        and one whose KL is not finite has none.
        """
        if self.config.controller == "fixed" or num_responses == 0 or not math.isfinite(kl):
            return
        error = min(max(kl / self.config.target - 1, -0.2), 0.2)
        self.coef *= max(1 + error * num_responses / self.config.horizon, LEAST_FACTOR)

    def state_dict(self) -> dict[str, Any]:
        """The coefficient of the next iteration."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the saved coefficient."""
        self.coef = float(state["coef"])


def first_groups(group: Sequence[int], keep: Sequence[bool], count: int) -> set[int]:
    """The first ``count`` groups with a kept response; group ids grow with the order of the prompts."""
    return set(sorted({g for g, kept in zip(group, keep, strict=True) if kept})[:count])
