"""Pairs with a target for the gap: preferences that are certain cannot drive the policy away from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.config import more_than
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.pairs import log_ratios_of_pairs, loss_of_pairs, sums_of_pairs


@LOSSES.register
@dataclass(frozen=True)
class IPO:
    """Identity preference optimisation (arXiv:2310.12036, equation 17).

    With d the log-ratio of the chosen response to the reference minus that of the rejected one, each as a mean over its
    tokens, the loss of a pair is ``(d - 1 / (2 beta))^2``: it is least where the gap has that size. The paper has sums;
    means make beta independent of lengths, which its authors confirmed to be what they ran (TRL does the same).

    Metrics: as in ``dpo``, with rewards made of the means.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "ref_logprob", "group"})
    whole_sequences: ClassVar[bool] = True
    zero_at_zero_advantage: ClassVar[bool] = False

    beta: float = 0.1  # the paper's tau: the gap aimed at is 1 / (2 beta) nats per token

    def __post_init__(self) -> None:
        more_than("beta", self.beta, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens of whole pairs -> [N] losses and metrics."""
        log_ratios = log_ratios_of_pairs(x, per_token=True)
        gap = log_ratios[:, 0] - log_ratios[:, 1]  # [B]
        loss = (gap - 1 / (2 * self.beta)) ** 2
        return loss_of_pairs(x, loss, self.beta * log_ratios, logprob=sums_of_pairs(x, x.logprob.detach()))
