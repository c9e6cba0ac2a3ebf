"""Optimal token baseline: a baseline per token position, weighted by the gradient norm of each response so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.core.config import more_than
from rlmodule.core.types import AdvantageInputs
from rlmodule.ops.masked import group_statistics


@ADVANTAGES.register
@dataclass(frozen=True)
class OptimalTokenBaseline:
    """Optimal token baseline (arXiv:2602.07078), for a reward of the whole response.

    The t-th loss token of response i gets R_i - b_t with b_t = sum(W_t R) / sum(W_t) over the responses of its group
    that have a t-th loss token. W_t, the realised energy, is the sum of 1 - 2 p + sum over the vocabulary of p^2 over
    the first t tokens. Each term is the squared norm of the gradient of a token's log-probability by the logits; the
    sum is a proxy for the squared norm of the gradient of all of them. A position that only one response has gets 0, as
    do groups of equal rewards; unscored responses are left out of the sums and get 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"group", "energy"})
    per_token: ClassVar[bool] = True

    eps: float = 1e-8  # added to every W_t; where all energies are near 0, responses have equal weight

    def __post_init__(self) -> None:
        more_than("eps", self.eps, 0)

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration and [N] energies -> [N] float64 advantages."""
        lengths = x.loss_tokens
        response = torch.arange(len(lengths)).repeat_interleave(lengths)  # [N]
        start = (lengths.cumsum(0) - lengths)[response]  # [N] first loss token of the same response
        position = torch.arange(len(response)) - start  # [N] loss tokens before this one
        energy = self.token_energy(x)
        cumulative = energy.cumsum(0)
        weight = cumulative - (cumulative - energy)[start] + self.eps  # [N]
        is_scored = torch.isfinite(x.reward)
        is_valid = (is_scored & ~group_statistics(x.reward, x.group, is_scored).has_zero_std)[response]  # [N]
        reward = torch.where(is_scored, x.reward.double(), 0.0)[response]  # [N]
        _, group = torch.unique(x.group, return_inverse=True)
        _, cell = torch.unique(
            torch.stack([group[response], position]), dim=1, return_inverse=True
        )  # [N] (group, position)
        weight = torch.where(is_valid, weight, 0.0)
        total, weighted, num_responses = torch.zeros(3, len(cell), dtype=torch.float64)
        total.index_add_(0, cell, weight)
        weighted.index_add_(0, cell, weight * reward)
        num_responses.index_add_(0, cell, is_valid.double())
        baseline = (weighted / total.clamp(min=torch.finfo(torch.float64).tiny))[cell]
        return torch.where(is_valid & (num_responses[cell] > 1), reward - baseline, 0.0)

    def token_energy(self, x: AdvantageInputs) -> Tensor:
        """[N] float64 squared norm of the gradient of each token's loss."""
        assert x.energy is not None, "optimal_token_baseline needs energy"
        return x.energy.double()
