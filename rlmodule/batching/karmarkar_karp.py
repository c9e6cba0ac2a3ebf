"""Planners with equal counts: the classic one by largest differencing, and micro-batches of a fixed size."""

from __future__ import annotations

import numpy as np

from rlmodule.batching.packing import Packing, packing_of
from rlmodule.batching.partition import Ints, balanced_counts, by_falling_cost, karmarkar_karp
from rlmodule.batching.workload import Floats


def plan_karmarkar_karp(cost: Floats, length: Ints, dp_size: int, token_budget: int, multiple_of: int) -> Packing:
    """Part the mini-batch over ranks in equal counts, then every rank's share into micro-batches by itself.

    Args:
        cost, length: [n] cost and tokens of each sample; no sample is longer than the budget.
        dp_size: data ranks.
        token_budget: most tokens of one micro-batch.
        multiple_of: the number of micro-steps is a multiple of this.

    Returns:
        The packing; all ranks take as many micro-batches as the one that needs most.
    """
    shares = [np.array(share, np.int64) for share in balanced_counts(cost, dp_size)]
    num_steps = max(1, *(-(-int(length[share].sum()) // token_budget) for share in shares))
    num_steps += -num_steps % multiple_of
    # Ends: with as many micro-batches as samples every sample is alone.
    while (packing := _cut_alone(cost, shares, num_steps)).sums(length).max() > token_budget:
        num_steps += multiple_of
    return packing


def _cut_alone(cost: Floats, shares: list[Ints], num_steps: int) -> Packing:
    """Every rank parts its share into ``num_steps`` micro-batches, dearest first."""
    cut = [[share[part].tolist() for part in karmarkar_karp(cost[share], num_steps)] for share in shares]
    return packing_of([list(step) for step in zip(*cut, strict=True)])


def plan_fixed_size(cost: Floats, dp_size: int, micro_batch_size: int) -> Packing:
    """Micro-batches of ``micro_batch_size`` samples: samples alike in cost share a micro-step, evened over its ranks.

    Neighbours in sorted order meet in one micro-step, so its micro-batches differ little however they are filled; what
    does not fill a micro-step is dealt out in counts that differ by at most one.
    """
    order = by_falling_cost(cost)
    per_step = dp_size * micro_batch_size
    steps = [order[start : start + per_step] for start in range(0, len(order), per_step)]
    cells = [[step[part].tolist() for part in balanced_counts(cost[step], dp_size)] for step in steps]
    return packing_of(cells).with_ranks_evened(cost)


def plan_fixed_size_karmarkar_karp(cost: Floats, dp_size: int, micro_batch_size: int) -> Packing:
    """Part the mini-batch over ranks in equal counts; every rank cuts its share, dearest first."""
    shares = [np.array(share, np.int64) for share in balanced_counts(cost, dp_size)]
    shares = [share[by_falling_cost(cost[share])] for share in shares]
    starts = range(0, max(map(len, shares)), micro_batch_size)
    return packing_of([[share[start : start + micro_batch_size].tolist() for share in shares] for start in starts])
