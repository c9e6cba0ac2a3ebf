"""Local search of the joint planner: pairs of cells swap samples to lower the lock-step cost.

``improve`` swaps between many pairs of cells at a time; ``refine`` works on the most expensive cell of one micro-step.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.initial_packings import Problem, Targets
from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats

Members = NDArray[np.int32]

# Swaps of a round for which every cell still offers more than the fewest candidates.
SWAPS_AT_ONCE = 10_000
# Swaps evaluated in one array operation: enough to amortise the interpreter, few enough to stay in cache.
SWAPS_IN_CACHE = 100_000
# Fewest and most samples of a cell that are considered for a swap; the more cells, the fewer samples of each.
CANDIDATES = (4, 8)
# A round counts as a gain if it lowers the cost by this share; so many rounds without gain end the search.
LEAST_GAIN, PATIENCE = 1e-5, 8


class Cells:
    """A mutable packing: the samples of each cell, with their sums.

    Attributes:
        values: [2, n + 1] float64 cost and tokens of each sample, by falling cost; entry n stands for no sample, is 0.
        members: [C, W + 1] int32 samples of each cell, ascending, filled up with n, which ends every row.
        work, used: [C] float64 cost and tokens of each cell.
    """

    def __init__(self, problem: Problem, cell: Ints, num_steps: int) -> None:
        self.num_steps, self.dp_size, self.token_budget = num_steps, problem.dp_size, problem.token_budget
        self.none = len(cell)
        self.values = np.zeros((2, len(cell) + 1))
        self.values[0, :-1], self.values[1, :-1] = problem.cost, problem.length
        size = np.bincount(cell, minlength=num_steps * problem.dp_size)  # [C]
        by_cell = cell.argsort(kind="stable")
        column = np.arange(len(cell)) - (size.cumsum() - size).repeat(size)
        self.members = np.full((len(size), int(size.max()) + 1), self.none, np.int32)
        self.members[cell[by_cell], column] = by_cell
        self.update_sums()

    @property
    def lockstep_cost(self) -> float:
        """Sum over micro-steps of the most expensive cell, with cells assigned to micro-steps by falling cost."""
        return lockstep_cost(self.work, self.dp_size)

    def cell_of_sample(self) -> Ints:
        """[n] cell of each sample; cells are renumbered by falling cost."""
        most_expensive_first = self.members[np.argsort(-self.work, kind="stable")]
        cell = np.empty(self.none + 1, np.int64)
        cell[most_expensive_first] = np.arange(len(most_expensive_first))[:, None]
        return cell[:-1]

    def replace_members(self, rows: Ints, members: Members) -> None:
        """Set the members of P cells, [P, more than W] in any order, filled up with n."""
        members.sort(axis=1)
        width = self.members.shape[1]
        if (members[:, width - 1] < self.none).any():
            grown = int((members < self.none).sum(axis=1).max()) + 1 - width
            room = np.full((len(self.members), grown), self.none, np.int32)
            self.members = np.concatenate([self.members, room], axis=1)
        members = members[:, : self.members.shape[1]]
        self.members[rows] = members
        self.work[rows], self.used[rows] = np.add.reduce(self.values[:, members], axis=2)

    def update_sums(self) -> None:
        """Recompute ``work`` and ``used``."""
        self.work, self.used = np.add.reduce(self.values[:, self.members], axis=2)


def lockstep_cost(work: Floats, dp_size: int) -> float:
    """[C] cost of each cell -> sum over micro-steps of the most expensive one, assigned to them by falling cost."""
    return float(np.add.reduce(np.sort(work)[::-dp_size]))


class Swaps(NamedTuple):
    """One swap for each of P pairs of cells.

    Args:
        pairs: [2, P] cells.
        moved: [2, P, 2] samples that leave the first and the second cell of each pair for the other one; n for none.
        residual: [P] absolute difference between the cost that moves and the cost that should move.
    """

    pairs: Ints
    moved: Members
    residual: Floats

    def apply(self, cells: Cells, which: Ints) -> None:
        """Perform the swaps of some pairs in ``cells``; a cell must not be in two of them."""
        if len(which) == 0:
            return
        rows, moved = self.pairs[:, which], self.moved[:, which]
        members = cells.members[rows]  # [2, p, W + 1]
        members[(members == moved[:, :, :1]) | (members == moved[:, :, 1:])] = cells.none
        members = np.concatenate([members, moved[::-1]], axis=2)
        cells.replace_members(rows.ravel(), members.reshape(-1, members.shape[2]))


def best_swaps(cells: Cells, pairs: Ints, transfer: Floats, turn: int) -> Swaps:
    """Find for each pair of cells the swap that moves nearest to the wanted cost, with at most two samples each way.

    Args:
        cells: the packing.
        pairs: [2, P] cells.
        transfer: [P] net cost to move from the first to the second.
        turn: number of the round; it rotates the candidates of cells that have more than are considered.
    """
    num_pairs = len(transfer)
    num_candidates = _num_candidates(num_pairs)
    at_once = max(1, SWAPS_IN_CACHE // len(_subsets(num_candidates)[0]) ** 2)
    if num_pairs <= at_once:
        return _best_swaps(cells, pairs, transfer, num_candidates, turn)
    parts = [slice(start, start + at_once) for start in range(0, num_pairs, at_once)]
    found = [_best_swaps(cells, pairs[:, part], transfer[part], num_candidates, turn) for part in parts]
    moved = np.concatenate([swaps.moved for swaps in found], axis=1)
    return Swaps(pairs, moved, np.concatenate([swaps.residual for swaps in found]))


def _best_swaps(cells: Cells, pairs: Ints, transfer: Floats, num_candidates: int, turn: int) -> Swaps:
    """The best swap of each pair, all swaps held at once."""
    num_pairs = len(transfer)
    candidates = _candidates(cells, pairs.ravel(), num_candidates, turn)  # [2P, w + 1]
    subsets, as_columns = _subsets(candidates.shape[1] - 1)  # [K, 2], [w + 1, K]
    # A column has at most two ones, so a product is a sum of two costs: the same bits on every machine.
    costs, tokens = cells.values[:, candidates] @ as_columns  # [2P, K] each
    # [P, K, K]: distance of the net cost that moves from ``transfer``, for every subset of first and of second
    residual = (costs[:num_pairs] - transfer[:, None])[:, :, None] - costs[num_pairs:, None, :]
    np.abs(residual, out=residual)
    best = residual.reshape(num_pairs, -1).argmin(axis=1)
    given, taken = np.divmod(best, len(subsets))
    pair = np.arange(num_pairs)
    # Net tokens that must leave the first cell for it to stay within the budget, and that the second one can take.
    least, most = cells.used[pairs[0]] - cells.token_budget, cells.token_budget - cells.used[pairs[1]]
    net = tokens[pair, given] - tokens[pair + num_pairs, taken]
    exceeds = (net > most) | (net < least)
    if exceeds.any():  # elsewhere the best of all swaps is the best of those within the budget
        wrong = np.flatnonzero(exceeds)
        net = tokens[wrong, :, None] - tokens[wrong + num_pairs, None, :]
        exceeds = (net > most[wrong, None, None]) | (net < least[wrong, None, None])
        best[wrong] = np.where(exceeds, np.inf, residual[wrong]).reshape(len(wrong), -1).argmin(axis=1)
        given, taken = np.divmod(best, len(subsets))
    chosen = subsets[np.concatenate([given, taken])]  # [2P, 2] columns of candidates
    moved = candidates[np.arange(2 * num_pairs)[:, None], chosen].reshape(2, num_pairs, 2)
    return Swaps(pairs, moved, residual[pair, given, taken])


def improve(cells: Cells, targets: Targets, rounds: int, good_enough: float) -> float:
    """Repeatedly swap samples between the cells furthest above their target and those furthest below.

    Targets that a single sample sets are fixed; the others are shifted to the mean of their cells. The two cells of a
    pair may be in different micro-steps.

    Args:
        cells: changed in place, to the best packing found.
        targets: of the micro-steps, as used for the initial packing.
        rounds: most rounds.
        good_enough: lock-step cost at which the search stops.

    Returns:
        Lock-step cost.
    """
    best = cells.lockstep_cost
    num_pairs = len(cells.work) // 2
    if best <= good_enough or num_pairs == 0:
        return best
    target = targets.target.repeat(cells.dp_size)
    movable = np.flatnonzero((~targets.from_sample).repeat(cells.dp_size))
    best_members, no_gain = cells.members.copy(), 0
    for turn in range(rounds):
        excess = cells.work - target
        if len(movable):
            excess[movable] -= np.add.reduce(excess[movable]) / len(movable)
        falling = (-excess).argsort(kind="stable")
        # After a round without gain every cell is paired with another one.
        shift = no_gain * max(1, num_pairs // (PATIENCE + 1)) % num_pairs
        lowest = falling[: -num_pairs - 1 : -1]
        pairs = np.array([falling[:num_pairs], np.concatenate([lowest[shift:], lowest[:shift]])])
        transfer = (excess[pairs[0]] - excess[pairs[1]]) / 2
        swaps = best_swaps(cells, pairs, transfer, turn)
        swaps.apply(cells, np.flatnonzero(swaps.residual < transfer * (1 - 1e-9)))
        cost = cells.lockstep_cost
        no_gain = 0 if cost < best * (1 - LEAST_GAIN) else no_gain + 1
        if cost < best:
            best, best_members = cost, cells.members.copy()
        if best <= good_enough or no_gain > PATIENCE:
            break
    cells.members = best_members
    cells.update_sums()
    return best


def refine(cells: Cells, attempts: int, good_enough: float) -> float:
    """Lower the most expensive cell of one micro-step after another by the best single swap with any other cell.

    Args:
        cells: changed in place; the lock-step cost never rises.
        attempts: most swaps that are tried.
        good_enough: lock-step cost at which the search stops.

    Returns:
        Lock-step cost.
    """
    best, no_gain = cells.lockstep_cost, 0  # ``no_gain`` is also the micro-step: one without gain is left for the next
    others = np.arange(len(cells.work) - 1)
    for turn in range(attempts):
        if best <= good_enough or no_gain >= cells.num_steps or len(others) == 0:
            break
        most_expensive, excess = _excess_over_others(cells, no_gain)
        pairs = np.array([np.full_like(others, most_expensive), others + (others >= most_expensive)])
        transfer = (excess[most_expensive] - excess[pairs[1]]) / 2
        swaps = best_swaps(cells, pairs, transfer, turn)
        # [P] excess, after the swap, of whichever of the two cells then exceeds its limit more
        larger_excess = swaps.residual + (excess[most_expensive] + excess[pairs[1]]) / 2
        chosen = larger_excess.argmin(keepdims=True)
        if cost_after(cells, swaps, chosen) < best * (1 - LEAST_GAIN):
            swaps.apply(cells, chosen)
            best, no_gain = cells.lockstep_cost, 0
        else:
            no_gain += 1
    return best


def cost_after(cells: Cells, swaps: Swaps, which: Ints) -> float:
    """Lock-step cost after the swap of one pair."""
    leaving = cells.values[0, swaps.moved[:, which]].sum(axis=2)  # [2, 1]
    work = cells.work.copy()
    work[swaps.pairs[:, which]] += leaving[::-1] - leaving
    return lockstep_cost(work, cells.dp_size)


def _excess_over_others(cells: Cells, step: int) -> tuple[int, Floats]:
    """The most expensive cell of micro-step ``step``, and [C] how far each cell exceeds its limit.

    A cell below its limit can grow up to it without raising the lock-step cost. The limit is the most expensive cell of
    the same micro-step; in ``step`` itself, which should become cheaper, the second most expensive.
    """
    falling = np.argsort(-cells.work, kind="stable").reshape(cells.num_steps, cells.dp_size)
    limit = np.empty(len(cells.work))
    limit[falling] = cells.work[falling[:, :1]]
    limit[falling[step]] = cells.work[falling[step, 1]] if cells.dp_size > 1 else 0.0
    return int(falling[step, 0]), cells.work - limit


@cache
def _num_candidates(num_pairs: int) -> int:
    """Samples considered per cell: their K subsets of at most two give K^2 swaps per pair of cells."""
    fewest, most = CANDIDATES
    return next((w for w in range(most, fewest, -1) if num_pairs * len(_subsets(w)[0]) ** 2 <= SWAPS_AT_ONCE), fewest)


def _candidates(cells: Cells, rows: Ints, num_candidates: int, turn: int) -> Members:
    """[P] cells -> [P, w + 1] samples evenly spaced in each, different ones every turn; n where a cell has fewer."""
    members = cells.members[rows]
    if members.shape[1] <= num_candidates + 1:
        return members
    size = np.maximum((members < cells.none).sum(axis=1), num_candidates)[:, None]
    column = (np.arange(num_candidates) * size // num_candidates + turn) % size
    column = np.concatenate([column, np.full_like(size, -1)], axis=1)
    candidates: Members = members[np.arange(len(rows))[:, None], column]
    return candidates


@cache
def _subsets(width: int) -> tuple[Ints, Floats]:
    """All subsets of at most two of ``width`` items: [K, 2] items, ``width`` for none; [width + 1, K] 1.0 for each."""
    choices = [chosen for size in range(3) for chosen in combinations(range(width), size)]
    table = np.zeros((width + 1, len(choices)))
    for column, chosen in enumerate(choices):
        table[list(chosen), column] = 1.0
    return np.array([(*chosen, width, width)[:2] for chosen in choices]), table
