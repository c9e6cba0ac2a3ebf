"""What happens to verdicts between the judge and the advantage: groups left out, long answers and KL charged for.

The judge's own verdict stays what is logged and what decides whether a group tells anything; only advantages see the
shaped reward. Leaves out where verdicts come from and who calls this (``experience/``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.ops.kl import ESTIMATORS
from rlmodule.ops.masked import group_statistics


@dataclass(frozen=True)
class FilterGroups:
    """Dynamic sampling (DAPO, arXiv:2503.14476): groups whose rewards are all equal are replaced by new ones."""

    enable: bool = False  # leave flat groups out and sample more prompts
    max_num_gen_batches: int = 10  # rounds of sampling in one iteration; then it trains on what there is

    def __post_init__(self) -> None:
        at_least("filter_groups.max_num_gen_batches", self.max_num_gen_batches, 1)


def has_reward_variance(reward: Tensor, group: Tensor) -> Tensor:
    """[B] bool: the response is in a group with two different scored rewards; reward [B] is NaN where unscored."""
    return ~group_statistics(reward, group, torch.isfinite(reward)).has_zero_std


@dataclass(frozen=True)
class OverlongBuffer:
    """Soft punishment of overlong answers (DAPO, arXiv:2503.14476, equation 13)."""

    enable: bool = False  # charge responses that come close to the limit
    length: int | None = (
        None  # tokens before the limit in which the charge grows; a fifth of the limit, as in the paper
    )
    penalty_factor: float = 1.0  # charge at the limit
    max_length: int | None = None  # the limit in tokens; rollout.max_response_length

    def __post_init__(self) -> None:
        at_least("overlong_buffer.penalty_factor", self.penalty_factor, 0)
        if self.length is not None:
            at_least("overlong_buffer.length", self.length, 1)
        if self.enable and self.max_length is None:
            raise ConfigError(
                key="overlong_buffer.max_length",
                got=None,
                because="the charge grows towards a limit",
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
        """Tokens in which the charge grows."""
        return max(1, (self.max_length or 0) // 5) if self.length is None else self.length

    @property
    def start(self) -> int:
        """Longest response that costs nothing."""
        return (self.max_length or 0) - self.width


def overlong_penalty(response_len: Tensor, config: OverlongBuffer) -> Tensor:
    """[B] tokens -> [B] float64 to take off the reward: 0 before the buffer, then a line up to ``penalty_factor``."""
    if not config.enable:
        return torch.zeros_like(response_len, dtype=torch.float64)
    inside = (response_len.double() - config.start) / config.width
    return config.penalty_factor * inside.clamp(0, 1)


@dataclass(frozen=True)
class KLInReward:
    """Price of leaving the reference, taken off the reward: coef * sum of the response's token estimates, in nats."""

    coef: float = 0.001  # price of a nat; where an adaptive controller starts
    estimator: str = "k1"  # k1, abs, k2 or k3; in a reward only the value counts, and k1 is unbiased
    controller: str = "fixed"  # fixed, or adaptive: steer the price towards target
    target: float = 6.0  # KL of a response that an adaptive controller aims at, nats
    horizon: float = 10000.0  # responses over which an adaptive controller moves

    def __post_init__(self) -> None:
        at_least("kl_in_reward.coef", self.coef, 0)
        one_of("kl_in_reward.estimator", self.estimator, ESTIMATORS)
        one_of("kl_in_reward.controller", self.controller, ("fixed", "adaptive"))
        more_than("kl_in_reward.target", self.target, 0)
        more_than("kl_in_reward.horizon", self.horizon, 0)


@dataclass
class KLController:
    """The price of a nat as training goes on; its state is saved with checkpoints (arXiv:1909.08593, section 2.2)."""

    config: KLInReward
    coef: float = field(init=False)

    def __post_init__(self) -> None:
        self.coef = self.config.coef

    def update(self, kl: float, num_responses: int) -> None:
        """Take note of the mean KL of ``num_responses`` responses.

        The price moves by at most a fifth of ``num_responses / horizon``, so one odd batch does little.
        """
        if self.config.controller == "fixed" or num_responses == 0:
            return
        error = min(max(kl / self.config.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_responses / self.config.horizon

    def state_dict(self) -> dict[str, Any]:
        """The price of the iteration to come."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the saved price."""
        self.coef = float(state["coef"])


def first_groups(group: Sequence[int], keep: Sequence[bool], count: int) -> set[int]:
    """The ``count`` smallest ids among the groups of kept responses; ids grow with the order of the prompts."""
    return set(sorted({g for g, kept in zip(group, keep, strict=True) if kept})[:count])
