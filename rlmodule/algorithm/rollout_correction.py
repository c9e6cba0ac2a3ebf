"""Rollout correction: importance weights for the mismatch between the rollout engine and the trainer.

An engine with the same weights in another arithmetic, or with weights a few versions behind, samples from a slightly
different policy. The loss of each token is multiplied by its probability under the trainer's old policy over that under
the rollout policy. Weights are computed per response, before micro-batches exist. Tokens of weight 0 still count as
loss tokens: the correction changes what is averaged, never the divisor. What leaves the divisor too is in
``rollout_rejection.py``, how far the two policies are apart in ``rollout_mismatch.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.ops.kl import bounded_exp

MODES = ("none", "observe", "truncate", "mask")
LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class RolloutCorrection:
    """How the mismatch between rollout engine and trainer is corrected; needs old log-probabilities of the trainer."""

    mode: str = "none"  # none; observe: only log; truncate: clamp the weight; mask: weight 0 outside the bounds
    level: str = "token"  # ratio of each token, product over the sequence, or geometric mean over it
    upper: float = 2.0  # largest weight
    lower: float = 0.0  # smallest weight
    veto: float = 0.0  # weight 0 for a response with any token ratio below this; 0: no veto

    def __post_init__(self) -> None:
        one_of("rollout_correction.mode", self.mode, MODES)
        one_of("rollout_correction.level", self.level, LEVELS)
        at_least("rollout_correction.lower", self.lower, 0)
        at_least("rollout_correction.veto", self.veto, 0)
        if not self.upper > self.lower:
            raise ConfigError(
                key="rollout_correction.upper",
                got=self.upper,
                because=f"no weight lies between lower={self.lower} and it",
                fix="Use rollout_correction.upper=2.0",
            )
        for name, is_wrong, usual in (
            ("lower", self.lower > 1, 0.5),
            ("upper", self.upper < 1, 2.0),
            ("veto", self.veto >= 1, 1e-4),
        ):
            if is_wrong:
                raise ConfigError(
                    key=f"rollout_correction.{name}",
                    got=getattr(self, name),
                    because="ratios of trainer to rollout engine are 1 where the two agree, which is out of this bound",
                    fix=f"Use rollout_correction.{name}={usual}",
                )

    @property
    def is_on(self) -> bool:
        """Whether log-probabilities of trainer and rollout engine are compared."""
        return self.mode != "none"


def correction_weights(old_logprob: Tensor, rollout_logprob: Tensor, config: RolloutCorrection) -> Tensor:
    """Weights of the loss tokens of one response.

    Args:
        old_logprob: [N] under the policy that starts the update, computed by the trainer.
        rollout_logprob: [N] with which the rollout engine sampled the tokens.
        config: bounds and level.

    Returns:
        [N] float64.
    """
    log_ratio = old_logprob.double() - rollout_logprob.double()
    ratio = unbounded_weights(old_logprob, rollout_logprob, config)
    if ratio is None:
        return torch.ones_like(log_ratio)
    if config.mode == "truncate":
        weight = ratio.clamp(config.lower, config.upper)
    else:
        weight = torch.where((ratio >= config.lower) & (ratio <= config.upper), ratio, 0.0)
    return torch.zeros_like(weight) if _is_vetoed(log_ratio, config) else weight


def unbounded_weights(old_logprob: Tensor, rollout_logprob: Tensor, config: RolloutCorrection) -> Tensor | None:
    """[N] float64 ratios at the level of the weights, before bounds; None where nothing is weighted."""
    if config.mode in ("none", "observe"):
        return None
    return bounded_exp(_at_level(old_logprob.double() - rollout_logprob.double(), config.level))


def _at_level(log_ratio: Tensor, level: str) -> Tensor:
    if level == "token" or not len(log_ratio):
        return log_ratio
    return (log_ratio.sum() if level == "sequence" else log_ratio.mean()).expand_as(log_ratio)


def _is_vetoed(log_ratio: Tensor, config: RolloutCorrection) -> bool:
    return config.veto > 0 and len(log_ratio) > 0 and float(log_ratio.min()) < math.log(config.veto)
