"""Bradley-Terry loss of preference pairs, for reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import softplus

from rlmodule.core.config import at_least
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.pairs import loss_of_pairs, sums_of_pairs


@LOSSES.register
@dataclass(frozen=True)
class BradleyTerry:
    """Bradley-Terry model (Biometrika 39, 1952) as the loss of a reward model (arXiv:2203.02155).

    With s the score of a response, the loss of a pair is ``-log sigmoid(s_chosen - s_rejected)``, plus ``center_coef``
    times the square of the sum of both scores, which keeps scores around 0 (arXiv:2312.09244). The score of a reward
    model arrives in the field ``logprob``, at the only loss token of a response, its end. (With a policy, the score
    would be the log-probability of the response.)

    Metrics, means over pairs: ``chosen_reward``, ``rejected_reward``, ``margin``, ``pair_accuracy``.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "group"})
    whole_sequences: ClassVar[bool] = True
    zero_at_zero_advantage: ClassVar[bool] = False

    center_coef: float = 0.0  # weight of the squared sum of a pair's scores

    def __post_init__(self) -> None:
        at_least("center_coef", self.center_coef, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens of whole pairs -> [N] losses and metrics."""
        scores = sums_of_pairs(x, x.logprob)
        chosen, rejected = scores.unbind(1)  # [B] each
        loss = softplus(rejected - chosen) + self.center_coef * (chosen + rejected).square()
        return loss_of_pairs(x, loss, scores)
