"""Initial packings of the joint planner: target costs of micro-steps, and greedy bin packing under them.

A cell is one micro-batch of one data rank, numbered ``micro-step * dp_size + rank``. The target of a micro-step is the
planned cost of its most expensive cell. Samples are placed one by one, most expensive first. ``local_search.py``
improves the result by swaps.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.packing import fewest_cells
from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats

# Cells that best_fit and fill_by_tokens try for a sample, in order of preference.
FIT_ATTEMPTS = 8


@dataclass(frozen=True, eq=False)
class Problem:
    """One mini-batch to pack.

    Args:
        cost: [n] float64 cost of each sample, falling.
        length: [n] int64 tokens of each sample, at most ``token_budget``.
        dp_size: data ranks, the cells of a micro-step.
        token_budget: most tokens of a cell.
    """

    cost: Floats
    length: Ints
    dp_size: int
    token_budget: int

    def fewest_steps(self) -> int:
        """Lower bound on the micro-steps, from the number of tokens and from the long samples."""
        return -(-fewest_cells(self.length, self.token_budget) // self.dp_size)

    def fullness(self, num_steps: int) -> float:
        """Tokens over the capacity of all cells, 0 to 1."""
        return float(self.length.sum()) / (num_steps * self.dp_size * self.token_budget)

    def least_cost(self, num_steps: int) -> float:
        """Lower bound on the lock-step cost of any packing."""
        cumulative = np.concatenate([[0.0], np.cumsum(self.cost)])  # [n + 1]
        # Samples above half the budget never share a cell, so a micro-step holds at most dp_size of them.
        big = self.cost[self.length > self.token_budget / 2][:: self.dp_size].sum()
        # Some cell holds k + 1 of the k * num_cells + 1 most expensive samples; it costs at least the cheapest k + 1.
        num_cells = num_steps * self.dp_size
        last = np.arange(0, len(self.cost), num_cells)  # k * num_cells
        pigeonhole = (cumulative[last + 1] - cumulative[last - np.arange(len(last))]).max(initial=0.0)
        return max(float(cumulative[-1]) / self.dp_size, float(big), float(pigeonhole))

    def least_cost_of_pairs(self) -> float:
        """Lower bound on the cost of a single micro-step, C cells, that is met where few ranks have two long samples.

        Of the C + p most expensive samples three share a cell, or p cells hold two of them. The cheapest way to pair 2p
        of them takes the cheapest 2p, and the most expensive of these with the cheapest, and so on inwards.
        """
        cells = self.dp_size
        most = min(cells, len(self.cost) - cells)  # p is 1 to this
        if most < 1:
            return 0.0
        pairs = self.cost[cells - most : cells][::-1] + self.cost[cells : cells + most]  # from the innermost outwards
        if cells == 1:
            return float(pairs[0])
        triples = np.convolve(self.cost[cells - 2 : cells + most], np.ones(3), "valid")
        return float(np.minimum(np.maximum.accumulate(pairs), triples).max())


@dataclass(frozen=True, eq=False)
class Targets:
    """Planned cost of the most expensive cell of each micro-step.

    Args:
        target: [M] float64, falling.
        from_sample: [M] bool, True where the largest sample of the micro-step alone sets the target.
    """

    target: Floats
    from_sample: NDArray[np.bool_]


def water_filled(problem: Problem, num_steps: int, tilt: float = 0.0) -> Targets:
    """Targets by water filling: all equal, except where the largest sample of a micro-step is above that level.

    Args:
        problem: the samples; sample ``i * dp_size`` is assumed to be the largest of micro-step i.
        num_steps: micro-steps, M.
        tilt: targets that no sample sets fall linearly from ``1 + tilt`` to ``1 - tilt`` times their mean. Where a cell
            holds a few large samples, no sum of them may come near one common target; different targets help.

    Returns:
        M targets; their sum exceeds the mean work of a rank only where the largest samples force it.
    """
    opening = problem.cost[:: problem.dp_size][:num_steps]
    largest = np.concatenate([opening, np.zeros(num_steps - len(opening))])
    slope = _slope(num_steps, tilt)
    work = float(problem.cost.sum()) / problem.dp_size
    fixed, level = np.zeros(num_steps, bool), 0.0
    while not fixed.all():
        level = (work - float(largest[fixed].sum())) / float(slope[~fixed].sum())
        short = ~fixed & (largest > level * slope)
        if not short.any():
            break
        fixed |= short
    return Targets(np.where(fixed, largest, level * slope), fixed)


@cache
def _slope(num_steps: int, tilt: float) -> Floats:
    """[M] targets over their mean."""
    return 1.0 + tilt * np.linspace(1.0, -1.0, num_steps)


def worst_fit(problem: Problem, targets: Targets) -> Ints | None:
    """Place each sample in the cell with the most room below its target among those that can hold its tokens.

    Returns:
        [n] cell of each sample, or None when a sample fits in no cell.
    """
    target = np.repeat(targets.target, problem.dp_size).tolist()
    cells = _CellsByRoom(target, range(len(target)), problem.token_budget)
    return _to_array(cells.place(cost, tokens) for cost, tokens in _samples(problem))


def best_fit(problem: Problem, targets: Targets) -> Ints | None:
    """Place each sample in the cell that it fills closest to the target, or the one with most room if it exceeds all.

    Good for large samples that must share cells: each is combined with samples that fill the rest of its cell.

    Returns:
        As ``worst_fit``.
    """
    target = np.repeat(targets.target, problem.dp_size).tolist()
    by_room = sorted((room, cell) for cell, room in enumerate(target))
    free = [problem.token_budget] * len(target)

    def place(cost: float, tokens: int) -> int | None:
        start = bisect_left(by_room, (cost, -1))
        for index in chain(range(start, len(by_room))[:FIT_ATTEMPTS], range(start)[: -FIT_ATTEMPTS - 1 : -1]):
            room, cell = by_room[index]
            if free[cell] >= tokens:
                del by_room[index]
                free[cell] -= tokens
                insort(by_room, (room - cost, cell))
                return cell
        return None

    return _to_array(place(cost, tokens) for cost, tokens in _samples(problem))


def fill_by_tokens(problem: Problem, targets: Targets) -> Ints | None:
    """Fill all micro-steps but the last up to the token budget; spread the remaining samples evenly over the last one.

    Good for tight token budgets: the last micro-step then holds short samples only, and is cheap.

    Returns:
        As ``worst_fit``; None also when there is a single micro-step.
    """
    target = np.repeat(targets.target, problem.dp_size).tolist()
    num_full = len(target) - problem.dp_size
    if num_full == 0:
        return None
    room = target[:num_full]
    by_free = [(problem.token_budget, cell) for cell in range(num_full)]
    rest = _CellsByRoom(target, range(num_full, len(target)), problem.token_budget)

    def place(cost: float, tokens: int) -> int | None:
        start = bisect_left(by_free, (tokens, -1))
        for index in range(start, min(start + FIT_ATTEMPTS, len(by_free))):
            free, cell = by_free[index]
            # 1e-9 for rounding: the largest sample of a micro-step must fit under the target that it sets.
            if cost <= room[cell] * (1 + 1e-9):
                del by_free[index]
                room[cell] -= cost
                insort(by_free, (free - tokens, cell))
                return cell
        return rest.place(cost, tokens)

    return _to_array(place(cost, tokens) for cost, tokens in _samples(problem))


class _CellsByRoom:
    """Cells in a heap by room below the target; cells without space for the tokens of a sample wait in a second heap.

    Most samples are shorter than the ones before them, so a waiting cell usually returns once, not for every sample.
    """

    def __init__(self, target: list[float], cells: range, token_budget: int) -> None:
        self.free = dict.fromkeys(cells, token_budget)
        self.by_room = [(-target[cell], cell) for cell in cells]
        self.waiting: list[tuple[int, float, int]] = []
        heapq.heapify(self.by_room)

    def place(self, cost: float, tokens: int) -> int | None:
        """Add a sample to the cell with most room that can hold its tokens; None when there is none."""
        while self.waiting and -self.waiting[0][0] >= tokens:
            _, room, cell = heapq.heappop(self.waiting)
            heapq.heappush(self.by_room, (room, cell))
        while self.by_room:
            room, cell = self.by_room[0]
            free = self.free[cell] - tokens
            if free >= 0:
                self.free[cell] = free
                heapq.heapreplace(self.by_room, (room + cost, cell))
                return cell
            heapq.heappop(self.by_room)
            heapq.heappush(self.waiting, (-self.free[cell], room, cell))
        return None


def _samples(problem: Problem) -> Iterable[tuple[float, int]]:
    return zip(problem.cost.tolist(), problem.length.tolist(), strict=True)


def _to_array(placed: Iterable[int | None]) -> Ints | None:
    """[n] cell of each sample; None as soon as a sample has none."""
    cells = []
    for cell in placed:
        if cell is None:
            return None
        cells.append(cell)
    return np.array(cells, np.int64)
