"""IPO: a squared loss of preference pairs with a target for the difference of their log-ratios."""

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
    tokens, the loss of a pair is ``(d - 1 / (2 beta))^2``. Unlike DPO it does not push d to infinity when a preference
    is certain. The paper writes sums over tokens; with means beta does not depend on lengths, and the authors have
    confirmed that they used means (as TRL does).

    Metrics: as in ``dpo``, with rewards from these means.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "ref_logprob", "group"})
    whole_sequences: ClassVar[bool] = True
    zero_at_zero_advantage: ClassVar[bool] = False

    beta: float = 0.1  # the paper's tau; the target of d is 1 / (2 beta) nats per token

    def __post_init__(self) -> None:
        more_than("beta", self.beta, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens of whole pairs -> [N] losses and metrics."""
        log_ratios = log_ratios_of_pairs(x, per_token=True)
        gap = log_ratios[:, 0] - log_ratios[:, 1]  # [B]
        loss = (gap - 1 / (2 * self.beta)) ** 2
        return loss_of_pairs(x, loss, self.beta * log_ratios, logprob=sums_of_pairs(x, x.logprob.detach()))
