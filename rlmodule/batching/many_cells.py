"""Initial packing of mini-batches with very many micro-batches, in array operations (hundreds of thousands of samples).

``initial_packings.py`` has the ones that place sample by sample.
"""

from __future__ import annotations

import numpy as np

from rlmodule.batching.initial_packings import Problem, Targets
from rlmodule.batching.partition import Ints

# Samples are placed in batches of this share of the cells: each changes the room of few cells, so that the order among
# the others is nearly that of placing one by one.
BATCHES = 16


def worst_fit_in_batches(problem: Problem, targets: Targets) -> Ints | None:
    """As ``worst_fit``, a batch of samples of alike cost at a time: one for each of the cells with most room.

    Cells with equal room go by number, so that the packing is the same on every machine.
    """
    room = np.repeat(targets.target, problem.dp_size)  # [C]
    free = np.full(len(room), problem.token_budget)  # [C]
    cell = np.empty(len(problem.cost), np.int64)
    batch, start = max(1, len(room) // BATCHES), 0
    while start < len(cell):
        samples = slice(start, min(start + batch, len(cell)))
        fits = np.flatnonzero(free >= problem.length[samples].max())
        if len(fits) == 0:
            return None
        chosen = fits[_largest(room[fits], samples.stop - start)]
        samples = slice(start, start + len(chosen))
        cell[samples] = chosen
        room[chosen] -= problem.cost[samples]
        free[chosen] -= problem.length[samples]
        start = samples.stop
    return cell


def _largest(values: np.ndarray, count: int) -> Ints:
    """Places of the ``count`` largest values, falling; equal ones by place."""
    if len(values) > count:
        least = np.partition(values, len(values) - count)[len(values) - count]
        above, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
        places = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    else:
        places = np.arange(len(values))
    falling: Ints = places[np.argsort(-values[places], kind="stable")]
    return falling
