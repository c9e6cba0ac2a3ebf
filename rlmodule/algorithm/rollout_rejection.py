"""Rollout rejection: loss tokens and responses on which rollout engine and trainer disagree too much leave the update.

With r = p_trainer / p_rollout, a token is judged by one of three numbers (http://joschu.net/blog/kl-approx.html): k1 is
r itself; k2 is (log r)^2 / 2; k3 is r - 1 - log r, whose mean estimates KL(rollout || trainer). A response is judged by
the sum, the mean or the extremes of these over its loss tokens; for k1 that is the product of the ratios, their
geometric mean, or the smallest and the largest ratio. What lies outside the bounds is rejected.

Rejected tokens count neither in the loss nor in what it is divided by; a response without any token left also leaves
the statistics of its group. Weights are another matter (``rollout_correction.py``), and both may be used together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError

ESTIMATORS = ("none", "k1", "k2", "k3")
REDUCTIONS = ("sum", "mean", "max")


@dataclass(frozen=True)
class RolloutRejection:
    """What is rejected; needs old log-probabilities of the trainer."""

    token_estimator: str = "none"  # tokens are judged by none, k1 (the ratio), k2 or k3
    token_lower: float = 0.0  # least value of a token that stays
    token_upper: float = 2.0  # greatest value of a token that stays
    sequence_estimator: str = "none"  # responses are judged by none, k1, k2 or k3
    sequence_reduce: str = "mean"  # sum, mean or max over the tokens; for k1 product, geometric mean, every ratio
    sequence_lower: float = 0.0  # least value of a response that stays
    sequence_upper: float = 2.0  # greatest value of a response that stays

    def __post_init__(self) -> None:
        for level, lower, upper in (
            ("token", self.token_lower, self.token_upper),
            ("sequence", self.sequence_lower, self.sequence_upper),
        ):
            one_of(f"rollout_rejection.{level}_estimator", getattr(self, f"{level}_estimator"), ESTIMATORS)
            at_least(f"rollout_rejection.{level}_lower", lower, 0)
            if not upper > lower:
                raise ConfigError(
                    key=f"rollout_rejection.{level}_upper",
                    got=upper,
                    because=f"nothing lies between {level}_lower={lower} and it",
                    fix=f"Use rollout_rejection.{level}_upper=2.0",
                )
            if getattr(self, f"{level}_estimator") == "k1" and not lower <= 1 <= upper:
                raise ConfigError(
                    key=f"rollout_rejection.{level}_{'lower' if lower > 1 else 'upper'}",
                    got=lower if lower > 1 else upper,
                    because="k1 is the ratio of trainer to rollout engine, which is 1 where they agree",
                    fix=f"Use {level}_lower=0.5 and {level}_upper=2.0, or judge by k3",
                )
        one_of("rollout_rejection.sequence_reduce", self.sequence_reduce, REDUCTIONS)

    @property
    def is_on(self) -> bool:
        """Whether anything may be rejected."""
        return self.token_estimator != "none" or self.sequence_estimator != "none"


def kept_tokens(old_logprob: Tensor, rollout_logprob: Tensor, config: RolloutRejection) -> Tensor:
    """Which loss tokens of one response stay.

    Args:
        old_logprob: [N] under the policy that starts the update, computed by the trainer.
        rollout_logprob: [N] with which the rollout engine sampled the tokens.
        config: what is rejected.

    Returns:
        [N] bool; all False for a response that is rejected. Responses are judged by all their tokens, rejected or not.
    """
    log_ratio = old_logprob.double() - rollout_logprob.double()
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    if not len(log_ratio):
        return kept
    if config.token_estimator != "none":
        kept &= _within(
            _divergence(log_ratio, config.token_estimator),
            config.token_estimator,
            config.token_lower,
            config.token_upper,
        )
    if config.sequence_estimator != "none":
        value = _over_tokens(_divergence(log_ratio, config.sequence_estimator), config.sequence_reduce)
        kept &= _within(value, config.sequence_estimator, config.sequence_lower, config.sequence_upper).all()
    return kept


def _divergence(log_ratio: Tensor, estimator: str) -> Tensor:
    """[N] values of the tokens; for k1 the logarithm, in which products are sums."""
    if estimator == "k1":
        return log_ratio
    return log_ratio.square() / 2 if estimator == "k2" else torch.expm1(log_ratio) - log_ratio


def _over_tokens(value: Tensor, reduction: str) -> Tensor:
    """[N] -> [1], or [2] for the smallest and the largest."""
    if reduction == "max":
        return torch.stack([value.min(), value.max()])
    return (value.sum() if reduction == "sum" else value.mean())[None]


def _within(value: Tensor, estimator: str, lower: float, upper: float) -> Tensor:
    """Whether values lie between the bounds; those of k1 are bounds on the ratio. NaN lies nowhere."""
    if estimator == "k1":
        lower, upper = (math.log(lower) if lower > 0 else -math.inf), math.log(upper)
    return (value >= lower) & (value <= upper)
