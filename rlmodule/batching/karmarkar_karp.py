"""The Karmarkar-Karp planner: equal counts per rank first, then micro-batches of each rank by themselves."""

from __future__ import annotations

import numpy as np

from rlmodule.batching.packing import Packing, fewest_cells, least_steps, packing_of
from rlmodule.batching.partition import Ints, balanced_counts, karmarkar_karp
from rlmodule.batching.workload import Floats


def plan_karmarkar_karp(
    cost: Floats, length: Ints, dp_size: int, token_budget: int, multiple_of: int, min_steps: int
) -> Packing:
    """Partition the mini-batch over ranks in equal counts, then the share of every rank into micro-batches.

    Args:
        cost, length: [n] cost and tokens of each sample; none is longer than the budget.
        dp_size: data ranks.
        token_budget: most tokens of one micro-batch.
        multiple_of: the number of micro-steps is a multiple of this.
        min_steps: micro-steps at least, where there are samples for as many.

    Returns:
        The packing; all ranks have as many micro-batches as the rank that needs most.
    """
    shares = [np.array(share, np.int64) for share in balanced_counts(cost, dp_size)]
    num_steps = max(
        least_steps(min_steps, len(cost), dp_size), *(fewest_cells(length[share], token_budget) for share in shares)
    )
    num_steps += -num_steps % multiple_of
    # Terminates: with as many micro-batches as samples every sample has one of its own.
    while (packing := _partition_each_rank(cost, shares, num_steps)).sums(length).max() > token_budget:
        num_steps += multiple_of
    return packing


def _partition_each_rank(cost: Floats, shares: list[Ints], num_steps: int) -> Packing:
    """Partition the share of every rank into ``num_steps`` micro-batches, most expensive first."""
    parts = [[share[part].tolist() for part in karmarkar_karp(cost[share], num_steps)] for share in shares]
    return packing_of([list(step) for step in zip(*parts, strict=True)])
