"""GSPO: a clipped surrogate with one importance ratio per response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.core.config import at_least
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.kl import bounded_exp


@LOSSES.register
@dataclass(frozen=True)
class GSPO:
    """Group sequence policy optimisation (arXiv:2507.18071).

    With s = exp(mean over the response of logprob - old_logprob), every token has the loss
    ``-min(s A, clip(s, 1 - low, 1 + high) A)``; the mean passes its gradient to all tokens of the response. The paper
    uses ``seq-mean-token-mean``. The default range is small because means of log-ratios are small.

    Metrics: ``clip_frac`` tokens of clipped responses, ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = True
    zero_at_zero_advantage: ClassVar[bool] = True

    clip_ratio_low: float = 3e-4  # lower bound of the sequence ratio is 1 - clip_ratio_low
    clip_ratio_high: float = 4e-4  # upper bound of the sequence ratio is 1 + clip_ratio_high

    def __post_init__(self) -> None:
        at_least("clip_ratio_low", self.clip_ratio_low, 0)
        at_least("clip_ratio_high", self.clip_ratio_high, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "gspo needs old_logprob"
        assert x.advantage is not None, "gspo needs advantage"
        log_ratio = x.logprob - x.old_logprob
        ratio = self.ratio(x, log_ratio)
        plain = ratio * x.advantage
        gain = torch.minimum(plain, ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high) * x.advantage)
        return TokenLoss(loss=-gain, metrics={"clip_frac": (gain < plain).float(), "ppo_kl": -log_ratio.detach()})

    def ratio(self, x: LossInputs, log_ratio: Tensor) -> Tensor:
        """[N] logprob - old_logprob -> [N] ratio of the response that each token belongs to."""
        return bounded_exp(x.mean_per_sequence(log_ratio))
