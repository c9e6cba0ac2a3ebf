"""DPO: the loss of preference pairs whose rewards are log-ratios of the policy to the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch.nn.functional import softplus

from rlmodule.core.config import at_least, at_most, more_than
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.pairs import log_ratios_of_pairs, loss_of_pairs, nll_of_chosen, sums_of_pairs


@LOSSES.register
@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (arXiv:2305.18290), with the label smoothing of conservative DPO.

    With h = beta * (log-ratio of the chosen response to the reference - that of the rejected one), the loss of a pair
    is ``-(1 - s) log sigmoid(h) - s log sigmoid(-h)``, where s is ``label_smoothing``. Every token of the pair has this
    loss, so with ``loss_agg_mode=prompt-mean`` the loss of a step is the mean over its pairs. A pair with advantages 0
    (online DPO with two equal rewards) has no gradient.

    The loss depends on the difference only, so both responses may become less likely. ``nll_coef`` adds the negative
    log-likelihood of the chosen response, as a mean over its tokens (arXiv:2404.19733).

    Metrics, means over pairs: ``chosen_reward``, ``rejected_reward`` (beta times the log-ratio), ``margin``,
    ``pair_accuracy``; ``chosen_logprob``, ``rejected_logprob``, sums over the response in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "ref_logprob", "group"})
    whole_sequences: ClassVar[bool] = True
    zero_at_zero_advantage: ClassVar[bool] = False

    beta: float = 0.1  # reward per nat of log-ratio; a larger beta keeps the policy closer to the reference
    label_smoothing: float = 0.0  # assumed share of pairs with swapped labels
    nll_coef: float = 0.0  # weight of the chosen response's negative log-likelihood, nats per token

    def __post_init__(self) -> None:
        more_than("beta", self.beta, 0)
        at_least("label_smoothing", self.label_smoothing, 0)
        at_most("label_smoothing", self.label_smoothing, 0.5)
        at_least("nll_coef", self.nll_coef, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens of whole pairs -> [N] losses and metrics."""
        reward = self.beta * log_ratios_of_pairs(x)  # [B, 2]
        margin = reward[:, 0] - reward[:, 1]  # [B]
        loss = (1 - self.label_smoothing) * softplus(-margin) + self.label_smoothing * softplus(margin)
        out = loss_of_pairs(x, loss, reward, logprob=sums_of_pairs(x, x.logprob.detach()))
        return out if self.nll_coef == 0 else replace(out, loss=out.loss + self.nll_coef * nll_of_chosen(x))
