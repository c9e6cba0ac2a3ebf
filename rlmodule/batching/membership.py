"""Mini-batch membership: which samples share an optimizer step.

It depends on the samples, their order and the seed, never on the number of ranks.
"""

from __future__ import annotations

import numpy as np

from rlmodule.batching.partition import Ints, by_falling_cost
from rlmodule.batching.workload import Floats

# The number of ranks is unknown here; lock-step cost is estimated for ranks with this many samples of average cost.
SAMPLES_PER_RANK = 4
# Estimated relative saving that gathering a mini-batch of outliers must bring, since it gives up the equal mix of
# lengths: half a mini-batch of them must make the iteration 5 % shorter.
GATHERING_PENALTY = 0.1
# Numbers of gathered outliers that are tried, per mini-batch.
TAIL_SIZES = 64
# A block with gathered outliers gets no sample of this many strata just below them: a few more long samples could need
# one more micro-step.
SKIPPED_STRATA = 2


def numbered_by_appearance(group: Ints) -> Ints:
    """[n] group ids, any integers -> [n] group numbers 0, 1, ... in the order of first appearance."""
    _, first, group = np.unique(group, return_index=True, return_inverse=True)
    number = np.empty_like(first)
    number[np.argsort(first)] = np.arange(len(first))
    numbered: Ints = number[group]
    return numbered


def positions_of_blocks(block: Ints) -> list[Ints]:
    """[n] block of each sample, no block empty -> ascending positions of the samples of each block."""
    positions = np.argsort(block, kind="stable")
    return np.split(positions, np.cumsum(np.bincount(block))[:-1]) if len(block) else []


def blocks_in_order(size: Ints, mini_batch_size: int) -> Ints:
    """Group consecutive units into blocks of at most ``mini_batch_size`` samples.

    Args:
        size: [u] samples of each unit, at most ``mini_batch_size``.
        mini_batch_size: most samples of a block.

    Returns:
        [u] block of each unit.
    """
    assert size.max(initial=0) <= mini_batch_size, "a unit larger than a block"
    until = np.concatenate([[0], np.cumsum(size)])
    starts = [0]
    while starts[-1] < len(size):
        starts.append(int(np.searchsorted(until, until[starts[-1]] + mini_batch_size, side="right")) - 1)
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def blocks_of_one_mix(cost: Floats, mini_batch_size: int, seed: int) -> Ints:
    """Blocks of equal count and similar distribution of costs, except that outliers are gathered in the first blocks.

    A sample that costs more than the mean work of a rank makes the other ranks wait, once in every step with such a
    sample. Where this costs more than an uneven mix, the most expensive samples fill the first blocks. All other
    samples are assigned by stratified random sampling over their costs.

    Args:
        cost: [n] cost of each sample.
        mini_batch_size: samples of a block; the last block may have fewer.
        seed: seed of the assignment.

    Returns:
        [n] block of each sample.
    """
    falling = by_falling_cost(cost)
    num_gathered = _tail_size(cost[falling], mini_batch_size)
    sizes = np.bincount(np.arange(len(cost)) // mini_batch_size)  # of the blocks
    room = np.clip(np.cumsum(sizes) - num_gathered, 0, sizes)  # left in each block after the gathered samples
    # Seat k of a block with r seats draws quantile (k + u) / r of the sorted rest: one sample per stratum and block.
    drawn = np.random.default_rng(seed).random(int(room.sum()))
    seat = np.arange(len(drawn)) - np.repeat(np.cumsum(room) - room, room)
    skipped = np.where((room > 0) & (room < sizes), SKIPPED_STRATA, 0)
    quantile = (seat + np.repeat(skipped, room) + drawn) / np.repeat(skipped + room, room)
    block = np.empty(len(cost), np.int64)
    block[falling[:num_gathered]] = np.repeat(np.arange(len(sizes)), sizes - room)
    block[falling[num_gathered:]] = np.repeat(np.arange(len(sizes)), room)[np.argsort(quantile, kind="stable")]
    return block


def _tail_size(cost: Floats, mini_batch_size: int) -> int:
    """How many of the most expensive samples to gather; ``cost`` is [n], falling."""
    if len(cost) <= mini_batch_size:
        return 0
    within = np.arange(0, mini_batch_size, max(1, mini_batch_size // TAIL_SIZES))
    beyond = np.arange(mini_batch_size, len(cost) // 2 + 1, max(1, mini_batch_size // 4))
    sizes = np.concatenate([within, beyond])
    sizes = sizes[sizes < len(cost)]
    until = np.concatenate([[0.0], np.cumsum(cost)])
    cost_of_size = [
        _lockstep_bound(cost, until, mini_batch_size, int(size)) + GATHERING_PENALTY * size / mini_batch_size
        for size in sizes
    ]
    return int(sizes[int(np.argmin(cost_of_size))])


def _lockstep_bound(cost: Floats, until: Floats, mini_batch_size: int, num_gathered: int) -> float:
    """Lower bound on the lock-step cost of all blocks, over the mean work of a rank; 1.0 means no rank waits.

    A step costs at least its largest sample, and at least its work divided by the number of ranks.

    Args:
        cost, until: [n] costs, falling, and [n + 1] their cumulative sums.
        mini_batch_size: samples of a block.
        num_gathered: samples that fill the first blocks.
    """
    num_ranks = max(1.0, mini_batch_size / SAMPLES_PER_RANK)
    num_blocks = -(-len(cost) // mini_batch_size)
    mean_of_rest = (until[-1] - until[num_gathered]) / (len(cost) - num_gathered)
    starts = np.arange(0, num_gathered, mini_batch_size)
    ends = np.minimum(starts + mini_batch_size, num_gathered)
    gathered_work = until[ends] - until[starts] + (mini_batch_size - (ends - starts)) * mean_of_rest
    largest_of_rest = cost[num_gathered : num_gathered + num_blocks - len(starts)]
    steps = np.maximum(cost[starts], gathered_work / num_ranks).sum()
    steps += np.maximum(largest_of_rest, mini_batch_size * mean_of_rest / num_ranks).sum()
    return float(steps * num_ranks / until[-1]) if until[-1] else 1.0
