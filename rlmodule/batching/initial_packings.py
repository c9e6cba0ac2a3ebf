"""First packings of a mini-batch: how high each micro-step shall be, and samples put in one by one, dearest first.

A height is the cost meant for the dearest cell of a micro-step; a cell is one micro-batch, ``micro-step * dp_size +
place``. Levelling what comes out is in ``local_search.py``.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats

# How many cells a close or tight fit looks at in order of preference.
FIT_ATTEMPTS = 8


@dataclass(frozen=True, eq=False)
class Problem:
    """One mini-batch to be packed.

    Args:
        cost: [n] float64, falling.
        length: [n] int64, tokens of the same samples; none is longer than the budget.
        dp_size: cells of a micro-step.
        token_budget: most tokens of a cell.
    """

    cost: Floats
    length: Ints
    dp_size: int
    token_budget: int

    def fewest_steps(self) -> int:
        """Micro-steps without which the tokens do not fit, even cut at will."""
        return max(1, -(-int(self.length.sum()) // (self.dp_size * self.token_budget)))

    def fullness(self, num_steps: int) -> float:
        """Tokens over what the cells can hold."""
        return float(self.length.sum()) / (num_steps * self.dp_size * self.token_budget)

    def least_cost(self, num_steps: int) -> float:
        """Lock-step cost that no packing can beat."""
        run_state = np.concatenate([[0.0], np.cumsum(self.cost)])  # [n + 1]
        # Samples above half the budget never share a cell: dp_size of them at most go into one micro-step.
        big = self.cost[self.length > self.token_budget / 2][:: self.dp_size].sum()
        # Of the dearest k * num_cells + 1 samples some cell holds k + 1, and these cost the k + 1 cheapest or more.
        num_cells = num_steps * self.dp_size
        last = np.arange(0, len(self.cost), num_cells)  # k * num_cells
        crowded = (run_state[last + 1] - run_state[last - np.arange(len(last))]).max(initial=0.0)
        return max(float(run_state[-1]) / self.dp_size, float(big), float(crowded))


@dataclass(frozen=True, eq=False)
class Targets:
    """What the dearest cell of each micro-step is meant to cost.

    Args:
        target: [M] falling.
        from_sample: [M] bool, True where the largest sample of the micro-step leaves no choice.
    """

    target: Floats
    from_sample: NDArray[np.bool_]


def water_filled(problem: Problem, num_steps: int, tilt: float = 0.0) -> Targets:
    """Targets that add up to the work of a rank: as high as the largest sample must be, level for the rest.

    Args:
        problem: the samples; sample ``i * dp_size`` is taken to open micro-step i.
        num_steps: micro-steps, M.
        tilt: the rest falls from ``1 + tilt`` to ``1 - tilt`` times its mean. Where few large samples make up a cell,
            equal heights may fit none of their sums; unequal ones fit some.

    Returns:
        M heights; their sum is more than the work of a rank where the largest samples ask for it.
    """
    opening = problem.cost[:: problem.dp_size][:num_steps]
    largest = np.concatenate([opening, np.zeros(num_steps - len(opening))])
    slope = 1.0 + tilt * np.linspace(1.0, -1.0, num_steps)
    work = float(problem.cost.sum()) / problem.dp_size
    fixed, level = np.zeros(num_steps, bool), 0.0
    while not fixed.all():
        level = (work - float(largest[fixed].sum())) / float(slope[~fixed].sum())
        short = ~fixed & (largest > level * slope)
        if not short.any():
            break
        fixed |= short
    return Targets(np.where(fixed, largest, level * slope), fixed)


def worst_fit(problem: Problem, targets: Targets) -> Ints | None:
    """Each sample into the cell with most room below its height among those that can hold its tokens.

    Returns:
        [n] cell of each sample; None when a sample finds no cell.
    """
    target = np.repeat(targets.target, problem.dp_size).tolist()
    cells = _CellsByRoom(target, range(len(target)), problem.token_budget)
    return _collected(cells.place(cost, tokens) for cost, tokens in _samples(problem))


def best_fit(problem: Problem, targets: Targets) -> Ints | None:
    """Each sample into the cell it fills up closest to its height; where it fits under none, into the roomiest.

    Sees to large samples that have to share cells: they meet partners that leave no gap.

    Returns:
        As ``worst_fit``.
    """
    target = np.repeat(targets.target, problem.dp_size).tolist()
    by_room = sorted((height, cell) for cell, height in enumerate(target))
    free = [problem.token_budget] * len(target)

    def place(cost: float, tokens: int) -> int | None:
        start = bisect_left(by_room, (cost, -1))
        for at in chain(range(start, len(by_room))[:FIT_ATTEMPTS], range(start)[: -FIT_ATTEMPTS - 1 : -1]):
            room, cell = by_room[at]
            if free[cell] >= tokens:
                del by_room[at]
                free[cell] -= tokens
                insort(by_room, (room - cost, cell))
                return cell
        return None

    return _collected(place(cost, tokens) for cost, tokens in _samples(problem))


def fill_by_tokens(problem: Problem, targets: Targets) -> Ints | None:
    """All micro-steps but the last as full of tokens as they go; what is left shares the last one evenly.

    For budgets that bind: the last micro-step then holds short samples only, and is cheap.

    Returns:
        As ``worst_fit``; None too when there is but one micro-step.
    """
    target = np.repeat(targets.target, problem.dp_size).tolist()
    num_tall = len(target) - problem.dp_size
    if num_tall == 0:
        return None
    room = target[:num_tall]
    by_free = [(problem.token_budget, cell) for cell in range(num_tall)]
    rest = _CellsByRoom(target, range(num_tall, len(target)), problem.token_budget)

    def place(cost: float, tokens: int) -> int | None:
        start = bisect_left(by_free, (tokens, -1))
        for at in range(start, min(start + FIT_ATTEMPTS, len(by_free))):
            free, cell = by_free[at]
            # 1e-9: the largest sample fits under its own height in spite of rounding.
            if cost <= room[cell] * (1 + 1e-9):
                del by_free[at]
                room[cell] -= cost
                insort(by_free, (free - tokens, cell))
                return cell
        return rest.place(cost, tokens)

    return _collected(place(cost, tokens) for cost, tokens in _samples(problem))


class _CellsByRoom:
    """A heap of cells by room; those that could not hold the last sample wait aside by free tokens.

    Samples get shorter on the whole, so a cell comes back once, not for every sample.
    """

    def __init__(self, target: list[float], cells: range, token_budget: int) -> None:
        self.free = dict.fromkeys(cells, token_budget)
        self.by_room = [(-target[cell], cell) for cell in cells]
        self.aside: list[tuple[int, float, int]] = []
        heapq.heapify(self.by_room)

    def place(self, cost: float, tokens: int) -> int | None:
        """Take the cell with most room that can hold the tokens; None when there is none."""
        while self.aside and -self.aside[0][0] >= tokens:
            _, room, cell = heapq.heappop(self.aside)
            heapq.heappush(self.by_room, (room, cell))
        while self.by_room:
            room, cell = self.by_room[0]
            free = self.free[cell] - tokens
            if free >= 0:
                self.free[cell] = free
                heapq.heapreplace(self.by_room, (room + cost, cell))
                return cell
            heapq.heappop(self.by_room)
            heapq.heappush(self.aside, (-self.free[cell], room, cell))
        return None


def _samples(problem: Problem) -> Iterable[tuple[float, int]]:
    return zip(problem.cost.tolist(), problem.length.tolist(), strict=True)


def _collected(places: Iterable[int | None]) -> Ints | None:
    cells = []
    for cell in places:
        if cell is None:
            return None
        cells.append(cell)
    return np.array(cells, np.int64)
