"""First packings of a mini-batch: how high each micro-step shall be, and samples put in one by one, dearest first.

Heights and work are costs. Samples arrive sorted by falling cost throughout this file.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats

# How many cells the tightest fit looks at before it gives up on the tall micro-steps.
FIT_ATTEMPTS = 8


@dataclass(frozen=True, eq=False)
class Heights:
    """What the dearest cell of each micro-step is meant to cost.

    Args:
        target: [M] falling.
        from_sample: [M] bool, True where the largest sample of the micro-step leaves no choice.
    """

    target: Floats
    from_sample: NDArray[np.bool_]

    @property
    def num_steps(self) -> int:
        """Micro-steps, M."""
        return len(self.target)


def water_filled(cost: Floats, dp_size: int, num_steps: int, tilt: float = 0.0) -> Heights:
    """Heights that add up to the work of a rank: as high as the largest sample must be, level for the rest.

    Args:
        cost: [n] falling.
        dp_size: cells of a micro-step.
        num_steps: micro-steps, M.
        tilt: the rest falls from ``1 + tilt`` to ``1 - tilt`` times its mean. Where few large samples make up a cell,
            equal heights may fit none of their sums; unequal ones fit some.

    Returns:
        M heights. Their sum is more than the work of a rank when the largest samples ask for it.
    """
    largest = np.zeros(num_steps)
    first = cost[::dp_size][:num_steps]  # sample i * dp_size cannot do better than open micro-step i
    largest[: len(first)] = first
    slope = 1.0 + tilt * np.linspace(1.0, -1.0, num_steps) if num_steps > 1 else np.ones(1)
    fixed = np.zeros(num_steps, bool)
    work = float(cost.sum()) / dp_size
    while True:
        free = ~fixed
        level = max(0.0, work - float(largest[fixed].sum())) / max(float(slope[free].sum()), 1e-300)
        target = np.where(fixed, largest, level * slope)
        short = free & (largest > target)
        if not short.any():
            return Heights(target, fixed)
        fixed |= short


def filled_roomiest(cost: Floats, length: Ints, heights: Heights, dp_size: int, token_budget: int) -> Ints | None:
    """Each sample into the cell with most room below its height among those that can hold its tokens.

    Cells that cannot hold a sample wait aside by free tokens: later samples are mostly shorter.

    Returns:
        [n] cell of each sample, ``micro-step * dp_size + place``; None when a sample finds no cell.
    """
    target = np.repeat(heights.target, dp_size).tolist()
    open_cells = _OpenCells(target, range(len(target)), token_budget)
    return _collected(open_cells.place(c, t) for c, t in zip(cost.tolist(), length.tolist(), strict=True))


def filled_tightest(cost: Floats, length: Ints, heights: Heights, dp_size: int, token_budget: int) -> Ints | None:
    """All micro-steps but the last are packed as full of tokens as they go; what is left shares the last one evenly.

    For budgets that bind: the last micro-step then holds short samples only, and is cheap.

    Returns:
        As ``filled_roomiest``; None too when there is but one micro-step.
    """
    if heights.num_steps == 1:
        return None
    target = np.repeat(heights.target, dp_size).tolist()
    num_tall = len(target) - dp_size
    room, free = target[:num_tall], [(token_budget, cell) for cell in range(num_tall)]  # free is sorted
    rest = _OpenCells(target, range(num_tall, len(target)), token_budget)

    def place(cost: float, tokens: int) -> int | None:
        start = bisect_left(free, (tokens, -1))
        for at in range(start, min(start + FIT_ATTEMPTS, len(free))):
            left, cell = free[at]
            # 1e-9: the largest sample fits its own height in spite of rounding.
            if cost <= room[cell] * (1 + 1e-9):
                del free[at]
                room[cell] -= cost
                insort(free, (left - tokens, cell))
                return cell
        return rest.place(cost, tokens)

    return _collected(place(c, t) for c, t in zip(cost.tolist(), length.tolist(), strict=True))


def filled_closest(cost: Floats, length: Ints, heights: Heights, dp_size: int, token_budget: int) -> Ints | None:
    """Each sample into the cell it fills up closest to its height; where it fits under none, into the one with most room.
    """
    target = np.repeat(heights.target, dp_size).tolist()
    room = sorted((height, cell) for cell, height in enumerate(target))
    free = [token_budget] * len(target)

    def place(cost: float, tokens: int) -> int | None:
        start = bisect_left(room, (cost, -1))
        for at in chain(range(start, len(room)), range(start - 1, -1, -1)):
            left, cell = room[at]
            if free[cell] >= tokens:
                del room[at]
                free[cell] -= tokens
                insort(room, (left - cost, cell))
                return cell
        return None

    return _collected(place(c, t) for c, t in zip(cost.tolist(), length.tolist(), strict=True))


class _OpenCells:
    """Cells by room, and aside, by free tokens, those that could not hold the last sample."""

    def __init__(self, target: list[float], cells: range, token_budget: int) -> None:
        self.free = dict.fromkeys(cells, token_budget)
        self.by_room = [(-target[cell], cell) for cell in cells]
        self.aside: list[tuple[int, float, int]] = []
        heapq.heapify(self.by_room)

    def place(self, cost: float, tokens: int) -> int | None:
        """The cell with most room that can hold the tokens, taken; None when there is none."""
        while self.aside and -self.aside[0][0] >= tokens:
            _, room, cell = heapq.heappop(self.aside)
            heapq.heappush(self.by_room, (room, cell))
        while self.by_room:
            room, cell = self.by_room[0]
            left = self.free[cell] - tokens
            if left >= 0:
                self.free[cell] = left
                heapq.heapreplace(self.by_room, (room + cost, cell))
                return cell
            heapq.heappop(self.by_room)
            heapq.heappush(self.aside, (-self.free[cell], room, cell))
        return None


def _collected(places: Iterator[int | None]) -> Ints | None:
    cells = []
    for place in places:
        if place is None:
            return None
        cells.append(place)
    return np.array(cells, np.int64)
