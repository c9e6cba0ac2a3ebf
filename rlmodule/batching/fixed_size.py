"""Planners for micro-batches of a fixed number of samples, ``batching.use_dynamic_bsz=false``."""

from __future__ import annotations

import numpy as np

from rlmodule.batching.packing import Packing, packing_of
from rlmodule.batching.partition import balanced_counts, by_falling_cost
from rlmodule.batching.workload import Floats


def plan_fixed_size(cost: Floats, dp_size: int, micro_batch_size: int) -> Packing:
    """Put samples of similar cost into the same micro-step, balanced over its ranks.

    Consecutive samples in sorted order form a micro-step, so its micro-batches cost about the same. In the last
    micro-step, if it is not full, the counts per rank differ by at most one.
    """
    order = by_falling_cost(cost)
    per_step = dp_size * micro_batch_size
    steps = [order[start : start + per_step] for start in range(0, len(order), per_step)]
    cells = [[step[part].tolist() for part in balanced_counts(cost[step], dp_size)] for step in steps]
    return packing_of(cells).with_balanced_ranks(cost)


def plan_fixed_size_karmarkar_karp(cost: Floats, dp_size: int, micro_batch_size: int) -> Packing:
    """Partition the mini-batch over ranks in equal counts; every rank splits its share, most expensive first."""
    shares = [np.array(share, np.int64) for share in balanced_counts(cost, dp_size)]
    shares = [share[by_falling_cost(cost[share])] for share in shares]
    starts = range(0, max(map(len, shares)), micro_batch_size)
    return packing_of([[share[start : start + micro_batch_size].tolist() for share in shares] for start in starts])
