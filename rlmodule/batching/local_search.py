"""Levelling: pairs of cells exchange samples until the dearest cell of every micro-step is cheap."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.initial_packings import Problem, Targets
from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats

# Swaps weighed at once: enough to hide the interpreter, few enough to stay in cache.
WEIGHED_AT_ONCE = 10_000
# Samples of a cell that are offered, at least and at most; more cells leave fewer offers for each.
OFFERED = (4, 8)
# Part of the cost by which a round must lower it, and how many fruitless rounds end the levelling.
LEAST_GAIN, PATIENCE = 1e-5, 8


class Cells:
    """Samples in cells, open to exchanges.

    Attributes:
        cost, tokens: [n + 1] of each sample, sorted by falling cost; the last entry is no sample: 0 and 0.
        members: [C, W] int64, samples of each cell, ascending; n where there is none.
        work, used: [C] cost and tokens of each cell.
    """

    def __init__(self, problem: Problem, cell: Ints, num_steps: int) -> None:
        self.num_steps, self.dp_size, self.token_budget = num_steps, problem.dp_size, problem.token_budget
        self.cost = np.append(problem.cost, 0.0)
        self.tokens = np.append(problem.length, 0).astype(np.float64)
        size = np.bincount(cell, minlength=num_steps * problem.dp_size)  # [C]
        by_cell = np.argsort(cell, kind="stable")
        column = np.arange(len(cell)) - np.repeat(np.cumsum(size) - size, size)
        self.members = np.full((len(size), max(1, int(size.max()))), len(cell))
        self.members[cell[by_cell], column] = by_cell
        self.weigh()

    @property
    def lockstep_cost(self) -> float:
        """Sum of the dearest cells when like cells share a micro-step."""
        return float(np.sort(self.work)[:: -self.dp_size].sum())

    def cell_of_sample(self) -> Ints:
        """[n] cell of each sample, renumbered so that dear cells come first."""
        dearest_first = self.members[np.argsort(-self.work, kind="stable")]
        cell = np.empty(len(self.cost), np.int64)
        cell[dearest_first] = np.arange(len(dearest_first))[:, None]
        return cell[:-1]

    def replace_members(self, rows: Ints, members: Ints) -> None:
        """[P] cells get the [P, any] members, in any order, filled up with n."""
        members = np.sort(members, axis=1)
        width = max(self.members.shape[1], int((members < len(self.cost) - 1).sum(axis=1).max()))
        grown = width - self.members.shape[1]
        if grown:
            room = np.full((len(self.members), grown), len(self.cost) - 1)
            self.members = np.concatenate([self.members, room], axis=1)
        self.members[rows] = members[:, :width]
        self.weigh(rows)

    def weigh(self, rows: Ints | None = None) -> None:
        """Sum up the cells again, all of them or some."""
        if rows is None:
            self.work, self.used = self.cost[self.members].sum(axis=1), self.tokens[self.members].sum(axis=1)
        else:
            held = self.members[rows]
            self.work[rows], self.used[rows] = self.cost[held].sum(axis=1), self.tokens[held].sum(axis=1)


@dataclass(frozen=True, eq=False)
class Swaps:
    """One exchange for each of P pairs of cells.

    Args:
        first, second: [P] cells.
        given, taken: [P, w] samples that go from first to second and back; n where there is none.
        miss: [P] how far the cost that changes sides is from what was wished.
    """

    first: Ints
    second: Ints
    given: Ints
    taken: Ints
    miss: Floats

    def chosen(self, which: Ints | NDArray[np.bool_]) -> Swaps:
        """Those of some pairs."""
        return Swaps(self.first[which], self.second[which], self.given[which], self.taken[which], self.miss[which])

    def make(self, cells: Cells) -> None:
        """Carry them out; no cell may be in two pairs."""
        if len(self.first) == 0:
            return
        none = len(cells.cost) - 1
        rows = np.concatenate([self.first, self.second])
        goes = np.concatenate([self.given, self.taken])
        comes = np.concatenate([self.taken, self.given])
        held = cells.members[rows]
        leaves = (held[:, :, None] == goes[:, None, :]).any(axis=2)
        cells.replace_members(rows, np.concatenate([np.where(leaves, none, held), comes], axis=1))


def best_swaps(cells: Cells, first: Ints, second: Ints, wished: Floats, turn: int) -> Swaps:
    """For each pair of cells the exchange, at most two samples each way, that moves nearest to the wished cost.

    Args:
        first, second: [P] cells of each pair.
        wished: [P] cost to move from first to second, all in all.
        turn: which samples are offered where a cell has more than are weighed.
    """
    pairs = len(first)
    offers = _offers(cells, np.concatenate([first, second]), _offered(pairs), turn)  # [2P, w]
    subsets, as_columns = _subsets(offers.shape[1])  # [K, w], [w, K]
    # At most two ones in a column: sums of two costs, the same to the last bit on every machine.
    sums = cells.cost[offers] @ as_columns  # [2P, K]
    # [P, K, K]: how far the net cost that moves is from the wish, for every choice of mine and theirs
    miss = (sums[:pairs] - wished[:, None])[:, :, None] - sums[pairs:, None, :]
    np.abs(miss, out=miss)
    tokens = cells.tokens[offers] @ as_columns
    least = cells.used[first] - cells.token_budget  # net tokens that have to move, for first to stay in the budget
    most = cells.token_budget - cells.used[second]
    if (tokens[:pairs].max(axis=1) > most).any() or (-tokens[pairs:].max(axis=1) < least).any():
        net = tokens[:pairs, :, None] - tokens[pairs:, None, :]
        miss[(net > most[:, None, None]) | (net < least[:, None, None])] = np.inf
    flat = miss.reshape(pairs, -1)
    best = flat.argmin(axis=1)
    sets = subsets[np.concatenate(np.divmod(best, len(subsets)))]  # [2P, w]
    moved = np.where(sets, offers, len(cells.cost) - 1)
    return Swaps(first, second, moved[:pairs], moved[pairs:], flat[np.arange(pairs), best])


def improve(cells: Cells, targets: Targets, rounds: int, good_enough: float) -> float:
    """Pair the cells furthest above their height with those furthest below, over and over.

    A height that comes from a sample stands; the others follow the mean of their cells. Pairs reach across micro-steps.

    Args:
        cells: changed in place, left as they were at their best.
        targets: of the micro-steps the cells were filled for.
        rounds: most rounds.
        good_enough: lock-step cost that ends the work early.

    Returns:
        Lock-step cost.
    """
    target = np.repeat(targets.target, cells.dp_size)
    movable = np.repeat(~targets.from_sample, cells.dp_size)
    best, kept, fruitless = cells.lockstep_cost, cells.members.copy(), 0
    num_pairs = len(target) // 2
    for turn in range(rounds):
        if best <= good_enough or fruitless > PATIENCE or num_pairs == 0:
            break
        excess = cells.work - target
        if movable.any():
            excess[movable] -= excess[movable].mean()
        falling = np.argsort(-excess, kind="stable")
        # After a fruitless round everybody gets another partner, until all kinds of pairs were tried.
        shift = fruitless * max(1, num_pairs // (PATIENCE + 1))
        first, second = falling[:num_pairs], falling[-1 - (np.arange(num_pairs) + shift) % num_pairs]
        wished = (excess[first] - excess[second]) / 2
        found = best_swaps(cells, first, second, wished, turn)
        found.chosen(found.miss < wished * (1 - 1e-9)).make(cells)
        now = cells.lockstep_cost
        fruitless = 0 if now < best * (1 - LEAST_GAIN) else fruitless + 1
        if now < best:
            best, kept = now, cells.members.copy()
    cells.members = kept
    cells.weigh()
    return best


def refine(cells: Cells, attempts: int, good_enough: float) -> float:
    """The cell that sets the cost of a micro-step against every other cell, one micro-step after the other.

    Args:
        cells: changed in place, never for the worse.
        attempts: how often an exchange is tried at most.
        good_enough: lock-step cost that ends the work early.

    Returns:
        Lock-step cost.
    """
    best, fruitless = cells.lockstep_cost, 0  # a fruitless attempt moves on to the next micro-step
    for turn in range(attempts):
        if best <= good_enough or fruitless >= cells.num_steps or len(cells.work) < 2:
            break
        dearest, excess = _excess_over_others(cells, fruitless)
        others = np.delete(np.arange(len(excess)), dearest)
        wished = (excess[dearest] - excess[others]) / 2
        found = best_swaps(cells, np.full(len(others), dearest), others, wished, turn)
        # The dearer of the two cells afterwards, over what it may cost.
        worse = found.miss + (excess[dearest] + excess[others]) / 2
        before = cells.members.copy()
        found.chosen(worse.argmin(keepdims=True)).make(cells)
        now = cells.lockstep_cost
        if now < best * (1 - LEAST_GAIN):
            best, fruitless = now, 0
        else:
            cells.members, fruitless = before, fruitless + 1
            cells.weigh()
    return best


def _excess_over_others(cells: Cells, step: int) -> tuple[int, Floats]:
    """The dearest cell of micro-step ``step``, and [C] how far each cell is above what costs nothing.

    That is the dearest cell of its micro-step; in ``step`` itself, which shall become cheaper, the second dearest.
    """
    falling = np.argsort(-cells.work, kind="stable").reshape(cells.num_steps, cells.dp_size)
    limit = np.empty(len(cells.work))
    limit[falling] = cells.work[falling[:, :1]]
    limit[falling[step]] = cells.work[falling[step, 1]] if cells.dp_size > 1 else 0.0
    return int(falling[step, 0]), cells.work - limit


@cache
def _offered(num_pairs: int) -> int:
    """Samples offered per cell: K subsets of one and two give K^2 exchanges a pair."""
    fewest, most = OFFERED
    return next((w for w in range(most, fewest, -1) if num_pairs * len(_subsets(w)[0]) ** 2 <= WEIGHED_AT_ONCE), fewest)


def _offers(cells: Cells, rows: Ints, offered: int, turn: int) -> Ints:
    """[P] cells -> [P, w] samples evenly drawn from each, others every turn; n where a cell has fewer."""
    held = cells.members[rows]
    if held.shape[1] <= offered:
        return held
    size = np.maximum((held < len(cells.cost) - 1).sum(axis=1), offered)[:, None]
    column = (np.arange(offered) * size // offered + turn) % size
    offers: Ints = held[np.arange(len(rows))[:, None], column]
    return offers


@cache
def _subsets(width: int) -> tuple[NDArray[np.bool_], Floats]:
    """Every choice of none, one or two: [K, width] bool, and its transpose to multiply with."""
    choices = [chosen for size in range(3) for chosen in combinations(range(width), size)]
    table = np.zeros((len(choices), width), bool)
    for row, chosen in enumerate(choices):
        table[row, list(chosen)] = True
    return table, np.ascontiguousarray(table.T, np.float64)
