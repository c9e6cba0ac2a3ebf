"""KL-Cov: policy gradient with a KL penalty on the tokens of highest covariance, against entropy collapse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.core.config import at_least
from rlmodule.core.types import LossInputs, TokenLoss, TokenMeans
from rlmodule.losses import LOSSES
from rlmodule.ops.kl import importance_ratio


@LOSSES.register
@dataclass(frozen=True)
class KLCov:
    """KL-Cov (arXiv:2505.22617).

    The covariance of a token is (A - mean A) * (logprob - mean logprob), with means over all loss tokens of the
    mini-batch on all data ranks. The loss is ``-ratio * A``, plus ``kl_coef * |logprob - old_logprob|`` on the tokens
    with the highest covariance: ``select_ratio`` times the number of all loss tokens, at least one.

    Metrics: ``cov_frac`` tokens with the penalty, ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage", "selected"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = False

    select_ratio: float = 2e-4  # share of the loss tokens that get the penalty
    kl_coef: float = 1.0  # weight of the penalty

    def __post_init__(self) -> None:
        at_least("select_ratio", self.select_ratio, 0)
        at_least("kl_coef", self.kl_coef, 0)

    def num_selected(self, tokens: int) -> int:
        """Number of tokens that get the penalty, out of ``tokens`` loss tokens."""
        return max(1, int(self.select_ratio * tokens))

    def priority(self, x: LossInputs, means: TokenMeans, keys: Tensor) -> Tensor:
        """[N] float64 covariance of each token."""
        assert x.advantage is not None, "kl_cov needs advantage"
        return (x.advantage.double() - means.advantage) * (x.logprob.double() - means.logprob)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "kl_cov needs old_logprob"
        assert x.advantage is not None, "kl_cov needs advantage"
        assert x.selected is not None, "kl_cov needs selected"
        log_ratio = x.logprob - x.old_logprob
        plain = -importance_ratio(x.logprob, x.old_logprob) * x.advantage
        loss = torch.where(x.selected, plain + self.kl_coef * log_ratio.abs(), plain)
        return TokenLoss(loss=loss, metrics={"cov_frac": x.selected.float(), "ppo_kl": -log_ratio.detach()})
