"""Optimal token baseline for importance-weighted losses: energies count by the square of each token's weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlmodule.advantages import ADVANTAGES
from rlmodule.advantages.optimal_token_baseline import OptimalTokenBaseline
from rlmodule.core.types import AdvantageInputs


@ADVANTAGES.register
@dataclass(frozen=True)
class WeightedOptimalTokenBaseline(OptimalTokenBaseline):
    """``optimal_token_baseline`` (arXiv:2602.07078) where each token's loss has a weight w_t of ``rollout_correction``.

    The term of token t in the gradient is then w_t (R - b_t) grad log p_t. With W_t the sum of w_s^2 times the energy
    of token s over s <= t, b_t = sum(W_t R) / sum(W_t) minimises the expected squared norm of such terms. Where all
    weights are 1, this is the baseline without weights. Rejected tokens have weight 0.
    """

    needs: ClassVar[frozenset[str]] = OptimalTokenBaseline.needs | {"rollout_weight"}

    def token_energy(self, x: AdvantageInputs) -> Tensor:
        """[N] float64, the energy times the square of the weight."""
        assert x.rollout_weight is not None, "weighted_optimal_token_baseline needs rollout_weight"
        return super().token_energy(x) * x.rollout_weight.double().square()
