"""Clip-Cov: PPO's clipping, and no loss on a few tokens of high covariance, against entropy collapse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import LossInputs, TokenLoss, TokenMeans
from rlmodule.losses import LOSSES
from rlmodule.ops.kl import importance_ratio
from rlmodule.ops.random import uniform_of


@LOSSES.register
@dataclass(frozen=True)
class ClipCov:
    """Clip-Cov (arXiv:2505.22617).

    The covariance of a token is (A - mean A) * (logprob - mean logprob), with means over all loss tokens of the
    mini-batch on all data ranks. Among the unclipped tokens with a covariance between the bounds, random ones get loss
    0: ``select_ratio`` times the number of all loss tokens, at least one. The choice is keyed by sample and position,
    so it depends neither on micro-batches nor on ranks.

    Metrics: ``clip_frac`` clipped tokens, ``cov_frac`` tokens whose loss was set to 0, ``ppo_kl`` old minus new
    log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage", "selected"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = False

    clip_ratio_low: float = 0.2  # lower bound of the ratio is 1 - clip_ratio_low
    clip_ratio_high: float = 0.2  # upper bound of the ratio is 1 + clip_ratio_high
    select_ratio: float = 2e-4  # share of the loss tokens that get loss 0
    cov_low: float = 1.0  # only tokens with a larger covariance are eligible
    cov_high: float = 5.0  # only tokens with a smaller covariance are eligible
    seed: int = 0  # seed of the random choice

    def __post_init__(self) -> None:
        at_least("clip_ratio_low", self.clip_ratio_low, 0)
        at_least("clip_ratio_high", self.clip_ratio_high, 0)
        at_least("select_ratio", self.select_ratio, 0)
        if not self.cov_low < self.cov_high:
            raise ConfigError(
                key="cov_high",
                got=self.cov_high,
                because=f"no covariance lies between cov_low={self.cov_low} and it",
                fix="Use cov_low=1.0 cov_high=5.0",
            )

    def num_selected(self, tokens: int) -> int:
        """Number of tokens that get loss 0, out of ``tokens`` loss tokens."""
        return max(1, int(self.select_ratio * tokens))

    def priority(self, x: LossInputs, means: TokenMeans, keys: Tensor) -> Tensor:
        """[N] float64: a random number for eligible tokens, minus infinity for the others."""
        assert x.advantage is not None, "clip_cov needs advantage"
        covariance = (x.advantage.double() - means.advantage) * (x.logprob.double() - means.logprob)
        is_clipped = self._is_clipped(importance_ratio(x.logprob, self._old(x)), x.advantage)
        is_eligible = (covariance > self.cov_low) & (covariance < self.cov_high) & ~is_clipped
        return torch.where(is_eligible, uniform_of(keys, self.seed), -torch.inf)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.advantage is not None, "clip_cov needs advantage"
        assert x.selected is not None, "clip_cov needs selected"
        ratio = importance_ratio(x.logprob, self._old(x))
        is_clipped = self._is_clipped(ratio, x.advantage)
        clipped = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        gain = torch.where(is_clipped, clipped, ratio) * x.advantage
        metrics = {
            "clip_frac": is_clipped.float(),
            "cov_frac": x.selected.float(),
            "ppo_kl": (self._old(x) - x.logprob).detach(),
        }
        return TokenLoss(loss=torch.where(x.selected, 0.0, -gain), metrics=metrics)

    def _old(self, x: LossInputs) -> Tensor:
        assert x.old_logprob is not None, "clip_cov needs old_logprob"
        return x.old_logprob

    def _is_clipped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        clipped = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        return clipped * advantage < ratio * advantage
