"""Hinge loss of preference pairs: no gradient once the margin is 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import relu

from rlmodule.core.config import more_than
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.pairs import log_ratios_of_pairs, loss_of_pairs, sums_of_pairs


@LOSSES.register
@dataclass(frozen=True)
class DPOHinge:
    """Hinge loss on DPO's margin (SLiC, arXiv:2305.10425; against a reference: ``hinge-norm`` in arXiv:2309.06657).

    With h = beta * (log-ratio of the chosen response to the reference - that of the rejected one), the loss of a pair
    is ``max(0, 1 - h)``.

    Metrics: as in ``dpo``.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "ref_logprob", "group"})
    whole_sequences: ClassVar[bool] = True
    zero_at_zero_advantage: ClassVar[bool] = False

    beta: float = 0.1  # reward per nat of log-ratio; the gradient stops at a difference of 1 / beta nats

    def __post_init__(self) -> None:
        more_than("beta", self.beta, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens of whole pairs -> [N] losses and metrics."""
        reward = self.beta * log_ratios_of_pairs(x)  # [B, 2]
        loss = relu(1 - (reward[:, 0] - reward[:, 1]))
        return loss_of_pairs(x, loss, reward, logprob=sums_of_pairs(x, x.logprob.detach()))
