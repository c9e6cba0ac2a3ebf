"""Initial packings with cells that several neighbouring ranks share, the shape of FlexSP (arXiv:2412.01523).

A cell is one packed row. Its width is the number of ranks that share it, a power of two up to the widest; its height
is what it costs each of them. Leaves out the search that improves a packing (``wide_search.py``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlmodule.batching.packing import Packing
from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Exchange, Floats

# What differs less than this share counts as equal.
EPSILON = 1e-9


@dataclass(frozen=True, eq=False)
class WideProblem:
    """One mini-batch to pack, in which rows may be shared.

    Args:
        cost: [n] float64 cost of each sample, falling.
        length: [n] int64 tokens of each sample, at most ``token_budget * widest``.
        dp_size: data ranks.
        token_budget: most tokens of a row on one rank.
        widest: most ranks that share a row, a power of two that divides ``dp_size``.
        exchange: what sharing a row costs.
    """

    cost: Floats
    length: Ints
    dp_size: int
    token_budget: int
    widest: int
    exchange: Exchange

    @property
    def ideal(self) -> float:
        """Lock-step cost if all work were level over all ranks and nothing were exchanged."""
        return float(self.cost.sum()) / self.dp_size

    @property
    def widths(self) -> list[int]:
        """Every width there is, ascending."""
        return [1 << power for power in range(self.widest.bit_length())]

    def fewest_steps(self) -> int:
        """Lower bound on the micro-steps, from the number of tokens."""
        return max(1, -(-int(self.length.sum()) // (self.dp_size * self.token_budget)))

    def narrowest(self) -> Ints:
        """[n] least width at which each sample is within the budget."""
        return np.array(self.widths)[np.searchsorted(self.widths, self.length / self.token_budget)]


@dataclass(frozen=True, eq=False)
class WideCells:
    """A packing into C cells; ranks that are in none of them have cells of their own without samples.

    Args:
        problem: what is packed.
        step, first, width: [C] int64 micro-step, first rank and number of ranks of each cell.
        cell: [n] int64 cell of each sample; a search changes it in place.
        num_steps: micro-steps.
    """

    problem: WideProblem
    step: Ints
    first: Ints
    width: Ints
    cell: Ints
    num_steps: int

    def heights(self) -> Floats:
        """[C] cost of each cell for each of its ranks."""
        work = np.bincount(self.cell, self.problem.cost, len(self.step))
        return work * self.problem.exchange.share(self.width)

    def tops(self, heights: Floats) -> Floats:
        """[num_steps] height of the highest cell of each micro-step."""
        top = np.zeros(self.num_steps)
        np.maximum.at(top, self.step, heights)
        return top

    @property
    def lockstep_cost(self) -> float:
        """Sum over micro-steps of the highest cell."""
        return float(self.tops(self.heights()).sum())

    def packing(self, order: Ints) -> Packing:
        """The packing of the samples in the order that they had before they were sorted by ``order``."""
        widths = np.ones((self.num_steps, self.problem.dp_size), np.int64)
        holds = np.bincount(self.cell, minlength=len(self.step)) > 0  # one without samples is split into dummies
        for step, first, width in zip(self.step[holds], self.first[holds], self.width[holds], strict=True):
            widths[step, first : first + width] = width
        cell = np.empty(len(self.cell), np.int64)
        cell[order] = (self.step * self.problem.dp_size + self.first)[self.cell]
        return Packing(cell, self.num_steps, self.problem.dp_size, widths)


def first_packing(problem: WideProblem, num_steps: int, widest: int, slack: float) -> WideCells | None:
    """Give the tallest samples cells of their own, wide enough for the level, and fill up with the others.

    Args:
        problem: the samples.
        num_steps: micro-steps.
        widest: most ranks that share a row here, at most that of the problem.
        slack: heights are planned to be so many times those that level all work.

    Returns:
        The packing, or None where tokens do not fit.
    """
    least = problem.narrowest()
    if int(least.max()) > widest:
        return None
    target = _targets(problem, num_steps, widest) * slack
    is_tall = (least > 1) | (problem.cost > target.min() * (1 + EPSILON))
    opened = _Opened(problem, target, widest)
    alone = [i for i in np.flatnonzero(is_tall).tolist() if opened.open(i, int(least[i]))]
    rest = np.setdiff1d(np.arange(len(problem.cost)), alone)
    if bool((least[rest] > 1).any()):
        return None
    step, first, width, number = opened.cells()
    cell = np.full(len(problem.cost), -1)
    cell[alone] = number
    share, held = problem.exchange.share(width), cell[alone]
    room, free = target[step], problem.token_budget * width
    room[held] -= problem.cost[alone] * share[held]
    free[held] -= problem.length[alone]
    placed = _roomiest(problem, rest, room, free, share)
    if placed is None:
        placed = _tightest(problem, rest, free)
    if placed is None:
        return None
    cell[rest] = placed
    return WideCells(problem, step, first, width, cell, num_steps)


def _targets(problem: WideProblem, num_steps: int, widest: int) -> Floats:
    """[num_steps] heights that add up to the work of a rank: at least those of the samples that open a micro-step."""
    narrow, wide = problem.exchange.share(np.array([min(widest, 2), widest]))
    per_step = problem.dp_size // widest
    opening = (problem.cost[::per_step] * wide)[:num_steps]
    work, overhead = problem.ideal, narrow * min(widest, 2) - 1
    for _ in range(2):  # exchange is paid for tall samples, which are known once there are heights
        target = _level(opening, work, num_steps)
        tall = float(problem.cost[problem.cost > target.min()].sum())
        work = problem.ideal + overhead * tall / problem.dp_size
    return target


def _level(opening: Floats, work: float, num_steps: int) -> Floats:
    """[num_steps] heights that add up to ``work`` by water filling over those that are given."""
    top = np.concatenate([opening, np.zeros(num_steps - len(opening))])
    fixed = np.zeros(num_steps, bool)
    while not fixed.all():
        level = max(0.0, (work - float(top[fixed].sum())) / int((~fixed).sum()))
        short = ~fixed & (top > level)
        if not short.any():
            return np.where(fixed, top, level)
        fixed |= short
    return top


class _Opened:
    """Cells that were opened for one sample each.

    Args:
        problem: the samples.
        target: [M] planned height of each micro-step.
        widest: most ranks of a cell.
    """

    def __init__(self, problem: WideProblem, target: Floats, widest: int) -> None:
        self.problem, self.target = problem, target.tolist()
        self.widths = [width for width in problem.widths if width <= widest]
        self.share = dict(zip(self.widths, problem.exchange.share(np.array(self.widths)).tolist(), strict=True))
        self.used = [0] * len(self.target)
        self.left: list[float] = (target * problem.dp_size).tolist()
        self.opened: list[tuple[int, int]] = []  # micro-step and width

    def open(self, sample: int, least: int) -> bool:
        """Open a cell where it needs the least width, among those micro-steps the one with most work left.

        False where no micro-step has ranks left for it.
        """
        cost, found = float(self.problem.cost[sample]), list[tuple[bool, int, float, int]]()
        for step, height in enumerate(self.target):
            limit = height * (1 + EPSILON)
            width = self._width(cost, least, limit)
            if self.used[step] + width <= self.problem.dp_size:
                found.append((cost * self.share[width] > limit, width, -self.left[step], step))
        if not found:
            return False
        _, width, _, step = min(found)
        self.used[step] += width
        self.left[step] -= cost
        self.opened.append((step, width))
        return True

    def _width(self, cost: float, least: int, height: float) -> int:
        """The least width from ``least`` on under which the height is not exceeded, or else the widest."""
        fits = (width for width in self.widths if width >= least and cost * self.share[width] <= height)
        return next(fits, self.widths[-1])

    def cells(self) -> tuple[Ints, Ints, Ints, Ints]:
        """(micro-step, first rank, width) of all cells, and the number of the cell that was opened i-th.

        Widths fall within a micro-step, which aligns powers of two; ranks that are left have cells of their own.
        """
        single = [(step, 1) for step, used in enumerate(self.used) for _ in range(self.problem.dp_size - used)]
        step, width = np.array([*self.opened, *single], np.int64).reshape(-1, 2).T
        order = np.lexsort((-width, step))
        step, width = step[order], width[order]
        before = np.cumsum(width) - width
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        return step, before % self.problem.dp_size, width, number[: len(self.opened)]


def _items(problem: WideProblem, samples: Ints) -> Iterator[tuple[float, int]]:
    return zip(problem.cost[samples].tolist(), problem.length[samples].tolist(), strict=True)


def _roomiest(problem: WideProblem, samples: Ints, room: Floats, free: Ints, share: Floats) -> list[int] | None:
    """Place each sample in the cell with most room below its height that can hold its tokens; None where none can."""
    heap = [(-height, cell) for cell, height in enumerate(room.tolist())]
    heapq.heapify(heap)
    left, shares, aside, placed = free.tolist(), share.tolist(), list[tuple[int, float, int]](), list[int]()
    for cost, tokens in _items(problem, samples):
        while aside and -aside[0][0] >= tokens:
            _, height, cell = heapq.heappop(aside)
            heapq.heappush(heap, (height, cell))
        while heap and left[heap[0][1]] < tokens:
            height, cell = heapq.heappop(heap)
            heapq.heappush(aside, (-left[cell], height, cell))
        if not heap:
            return None
        height, cell = heap[0]
        left[cell] -= tokens
        heapq.heapreplace(heap, (height + cost * shares[cell], cell))
        placed.append(cell)
    return placed


def _tightest(problem: WideProblem, samples: Ints, free: Ints) -> list[int] | None:
    """Place the longest sample first, each where the least space is left; None where it does not fit."""
    placed = dict[int, int]()
    left = free.copy()
    for sample in sorted(samples.tolist(), key=lambda one: -int(problem.length[one])):
        tokens = int(problem.length[sample])
        cell = int(np.where(left >= tokens, left, np.iinfo(np.int64).max).argmin())
        if left[cell] < tokens:
            return None
        left[cell] -= tokens
        placed[sample] = cell
    return [placed[sample] for sample in samples.tolist()]
