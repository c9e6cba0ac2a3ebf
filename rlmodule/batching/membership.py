"""Which samples share an optimizer step: decided from the samples, their order and the seed. No rank is known here."""

from __future__ import annotations

import numpy as np

from rlmodule.batching.partition import Ints, by_falling_cost
from rlmodule.batching.workload import Floats

# A step is meant to be level on as many ranks as leave each this many samples of average cost.
SAMPLES_PER_RANK = 4
# What it is worth to keep one mix of lengths: gathering the longest samples, as many as half a mini-batch, must make
# the iteration 5 % shorter on that many ranks.
PRICE_OF_GATHERING = 0.1
# Sizes of the gathered tail that are weighed, per mini-batch.
TAIL_SIZES = 64
# A block that holds gathered samples gets none of this many strata just below them: a few more long samples could
# cost it one more micro-step.
STRATA_SPARED = 2


def numbered_by_appearance(group: Ints) -> Ints:
    """[n] ids of groups, any integers -> [n] the same groups numbered 0, 1, ... in the order they first appear in."""
    _, first, group = np.unique(group, return_index=True, return_inverse=True)
    number = np.empty_like(first)
    number[np.argsort(first)] = np.arange(len(first))
    numbered: Ints = number[group]
    return numbered


def positions_of_blocks(block: Ints) -> list[Ints]:
    """[n] block of each sample, none empty -> the positions of each block, ascending."""
    positions = np.argsort(block, kind="stable")
    return np.split(positions, np.cumsum(np.bincount(block))[:-1]) if len(block) else []


def blocks_in_order(size: Ints, mini_batch_size: int) -> Ints:
    """Consecutive units, as many at a time as have ``mini_batch_size`` samples or fewer.

    Args:
        size: [u] samples of each unit; none has more than ``mini_batch_size``.
        mini_batch_size: most samples of a block; the last may have fewer.

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
    """Blocks of equal count with the same mix of costs, except that outliers are kept together.

    A sample that costs more than a rank's whole share makes all other ranks wait, once for every step that holds such a
    sample. Where that happens the dearest samples fill up the first blocks; all others are dealt out evenly, stratum by
    stratum, in an order drawn from the seed.

    Args:
        cost: [n] cost of each sample.
        mini_batch_size: samples of a block; the last may be short.
        seed: of the deal.

    Returns:
        [n] block of each sample.
    """
    falling = by_falling_cost(cost)
    num_gathered = _tail_size(cost[falling], mini_batch_size)
    sizes = np.bincount(np.arange(len(cost)) // mini_batch_size)  # of the blocks
    room = np.clip(np.cumsum(sizes) - num_gathered, 0, sizes)  # left in each block by the gathered ones
    # Seat k of a block with r seats draws the place (k + u) / r in the sorted rest: one of each stratum to every block.
    drawn = np.random.default_rng(seed).random(int(room.sum()))
    seat = np.arange(len(drawn)) - np.repeat(np.cumsum(room) - room, room)
    spared = np.where((room > 0) & (room < sizes), STRATA_SPARED, 0)
    place = (seat + np.repeat(spared, room) + drawn) / np.repeat(spared + room, room)
    block = np.empty(len(cost), np.int64)
    block[falling[:num_gathered]] = np.repeat(np.arange(len(sizes)), sizes - room)
    block[falling[num_gathered:]] = np.repeat(np.arange(len(sizes)), room)[np.argsort(place, kind="stable")]
    return block


def _tail_size(cost: Floats, mini_batch_size: int) -> int:
    """How many of the dearest samples to keep together; ``cost`` is [n] falling."""
    if len(cost) <= mini_batch_size:
        return 0
    within = np.arange(0, mini_batch_size, max(1, mini_batch_size // TAIL_SIZES))
    beyond = np.arange(mini_batch_size, len(cost) // 2 + 1, max(1, mini_batch_size // 4))
    sizes = np.concatenate([within, beyond])
    sizes = sizes[sizes < len(cost)]
    until = np.concatenate([[0.0], np.cumsum(cost)])
    cost_of_size = [
        _lockstep_bound(cost, until, mini_batch_size, int(size)) + PRICE_OF_GATHERING * size / mini_batch_size
        for size in sizes
    ]
    return int(sizes[int(np.argmin(cost_of_size))])


def _lockstep_bound(cost: Floats, until: Floats, mini_batch_size: int, num_gathered: int) -> float:
    """Steps as high as their largest sample or the mean work of a rank, in units of the mean; 1.0 is level.

    Args:
        cost, until: [n] falling, [n + 1] its running sums.
        mini_batch_size: samples of a block.
        num_gathered: samples that fill up the first blocks.
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
