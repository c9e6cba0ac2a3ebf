"""Initial packing where budgets are so full that placing sample by sample needs one more micro-step.

Costs have no say in it; ``local_search.py`` evens them out afterwards.
"""

from __future__ import annotations

import numpy as np

from rlmodule.batching.initial_packings import Problem
from rlmodule.batching.partition import Ints

# Samples times cells up to which it is tried: each pair is one operation on as many bits as a budget has tokens.
MOST_WORK = 100_000
# Bits of the sets that are held at once, one of the budget for each sample: 256 MiB.
MOST_BITS = 2**31


def fullest_first(problem: Problem, num_cells: int) -> Ints | None:
    """Fill one cell after the other as far as the samples that are left can fill it, the longest of them included.

    The sets of lengths that fit are found by subset sums. Of two sets with the same tokens the one with longer samples
    is taken, since short ones fill what is left of later cells.

    Returns:
        [n] cell of each sample, or None when they do not fit, or there are too many.
    """
    count, budget = len(problem.length), problem.token_budget
    if count * num_cells > MOST_WORK or count * budget > MOST_BITS or problem.length.sum() > num_cells * budget:
        return None
    left = np.argsort(-problem.length, kind="stable").tolist()
    lengths = problem.length.tolist()
    cell = np.full(len(lengths), -1, np.int64)
    for number in range(num_cells):
        if not left:
            break
        first, rest = left[0], left[1:]
        chosen = {first, *_fullest(rest, lengths, budget - lengths[first])}
        cell[list(chosen)] = number
        left = [sample for sample in rest if sample not in chosen]
    return None if left else cell


def _fullest(samples: list[int], lengths: list[int], room: int) -> list[int]:
    """Those of the samples, by falling length, whose lengths add up to the most tokens within ``room``."""
    within, reached = (1 << (room + 1)) - 1, [1]  # bit t: some of the samples so far have t tokens together
    for sample in samples:
        reached.append(reached[-1] | (reached[-1] << lengths[sample] & within))
    tokens, chosen = reached[-1].bit_length() - 1, []
    for place in range(len(samples), 0, -1):
        if not reached[place - 1] >> tokens & 1:
            chosen.append(samples[place - 1])
            tokens -= lengths[samples[place - 1]]
    return chosen
