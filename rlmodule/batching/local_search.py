"""Local search of the joint planner: pairs of cells swap samples to lower the lock-step cost.

``improve`` swaps between many pairs of cells at a time; ``refine`` works on the most expensive cell of one micro-step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.initial_packings import Problem, Targets
from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats

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
        cost, tokens: [n + 1] float64 of each sample, by falling cost; entry n stands for no sample and is 0.
        members: [C, W] int32 samples of each cell, ascending, filled up with n.
        work, used: [C] float64 cost and tokens of each cell.
    """

    def __init__(self, problem: Problem, cell: Ints, num_steps: int) -> None:
        self.num_steps, self.dp_size, self.token_budget = num_steps, problem.dp_size, problem.token_budget
        self.cost = np.append(problem.cost, 0.0)
        self.tokens = np.append(problem.length, 0).astype(np.float64)
        size = np.bincount(cell, minlength=num_steps * problem.dp_size)  # [C]
        by_cell = np.argsort(cell, kind="stable")
        column = np.arange(len(cell)) - np.repeat(np.cumsum(size) - size, size)
        self.members = np.full((len(size), max(1, int(size.max()))), len(cell), np.int32)
        self.members[cell[by_cell], column] = by_cell
        self.update_sums()

    @property
    def lockstep_cost(self) -> float:
        """Sum over micro-steps of the most expensive cell, with cells assigned to micro-steps by falling cost."""
        return float(np.sort(self.work)[:: -self.dp_size].sum())

    def cell_of_sample(self) -> Ints:
        """[n] cell of each sample; cells are renumbered by falling cost."""
        most_expensive_first = self.members[np.argsort(-self.work, kind="stable")]
        cell = np.empty(len(self.cost), np.int64)
        cell[most_expensive_first] = np.arange(len(most_expensive_first))[:, None]
        return cell[:-1]

    def replace_members(self, rows: Ints, members: Ints) -> None:
        """Set the members of P cells, [P, any] in any order, filled up with n."""
        members = np.sort(members, axis=1)
        width = max(self.members.shape[1], int((members < len(self.cost) - 1).sum(axis=1).max()))
        grown = width - self.members.shape[1]
        if grown:
            room = np.full((len(self.members), grown), len(self.cost) - 1, np.int32)
            self.members = np.concatenate([self.members, room], axis=1)
        self.members[rows] = members[:, :width]
        self.update_sums(rows)

    def update_sums(self, rows: Ints | None = None) -> None:
        """Recompute ``work`` and ``used`` of the given cells, or of all of them."""
        if rows is None:
            self.work, self.used = self.cost[self.members].sum(axis=1), self.tokens[self.members].sum(axis=1)
        else:
            members = self.members[rows]
            self.work[rows], self.used[rows] = self.cost[members].sum(axis=1), self.tokens[members].sum(axis=1)


@dataclass(frozen=True, eq=False)
class Swaps:
    """One swap for each of P pairs of cells.

    Args:
        first, second: [P] cells.
        given, taken: [P, w] samples that move from first to second and from second to first, filled up with n.
        residual: [P] absolute difference between the cost that moves and the cost that should move.
    """

    first: Ints
    second: Ints
    given: Ints
    taken: Ints
    residual: Floats

    def select(self, which: Ints | NDArray[np.bool_]) -> Swaps:
        """The swaps of the given pairs."""
        return Swaps(self.first[which], self.second[which], self.given[which], self.taken[which], self.residual[which])

    def apply(self, cells: Cells) -> None:
        """Perform the swaps in ``cells``; a cell must not be in two pairs."""
        if len(self.first) == 0:
            return
        none = len(cells.cost) - 1
        rows = np.concatenate([self.first, self.second])
        removed = np.concatenate([self.given, self.taken])
        added = np.concatenate([self.taken, self.given])
        members = cells.members[rows]
        is_removed = (members[:, :, None] == removed[:, None, :]).any(axis=2)
        cells.replace_members(rows, np.concatenate([np.where(is_removed, none, members), added], axis=1))


def best_swaps(cells: Cells, first: Ints, second: Ints, transfer: Floats, turn: int) -> Swaps:
    """Find for each pair of cells the swap that moves nearest to the wanted cost, with at most two samples each way.

    Args:
        cells: the packing.
        first, second: [P] cells of each pair.
        transfer: [P] net cost to move from first to second.
        turn: number of the round; it rotates the candidates of cells that have more than are considered.
    """
    num_candidates = _num_candidates(len(first))
    at_once = max(1, SWAPS_IN_CACHE // len(_subsets(num_candidates)[0]) ** 2)
    parts = [slice(start, start + at_once) for start in range(0, len(first), at_once)] or [slice(0, 0)]
    found = [_best_swaps(cells, first[part], second[part], transfer[part], num_candidates, turn) for part in parts]
    given, taken, residual = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return Swaps(first, second, given, taken, residual)


def _best_swaps(
    cells: Cells, first: Ints, second: Ints, transfer: Floats, num_candidates: int, turn: int
) -> tuple[Ints, Ints, Floats]:
    """``given``, ``taken`` and ``residual`` of the best swap of each pair, all swaps held at once."""
    pairs = len(first)
    candidates = _candidates(cells, np.concatenate([first, second]), num_candidates, turn)  # [2P, w]
    subsets, as_columns = _subsets(candidates.shape[1])  # [K, w], [w, K]
    # A column has at most two ones, so a product is a sum of two costs: the same bits on every machine.
    sums = cells.cost[candidates] @ as_columns  # [2P, K]
    # [P, K, K]: distance of the net cost that moves from ``transfer``, for every subset of first and of second
    residual = (sums[:pairs] - transfer[:, None])[:, :, None] - sums[pairs:, None, :]
    np.abs(residual, out=residual)
    tokens = cells.tokens[candidates] @ as_columns
    least = cells.used[first] - cells.token_budget  # net tokens that must leave first for it to stay within the budget
    most = cells.token_budget - cells.used[second]  # net tokens that second can take
    if (tokens[:pairs].max(axis=1) > most).any() or (-tokens[pairs:].max(axis=1) < least).any():
        net = tokens[:pairs, :, None] - tokens[pairs:, None, :]
        residual[(net > most[:, None, None]) | (net < least[:, None, None])] = np.inf
    flat = residual.reshape(pairs, len(subsets) ** 2)
    best = flat.argmin(axis=1)
    sets = subsets[np.concatenate(np.divmod(best, len(subsets)))]  # [2P, w]
    moved = np.where(sets, candidates, len(cells.cost) - 1)
    return moved[:pairs], moved[pairs:], flat[np.arange(pairs), best]


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
    target = np.repeat(targets.target, cells.dp_size)
    movable = np.repeat(~targets.from_sample, cells.dp_size)
    best, best_members, no_gain = cells.lockstep_cost, cells.members.copy(), 0
    num_pairs = len(target) // 2
    for turn in range(rounds):
        if best <= good_enough or no_gain > PATIENCE or num_pairs == 0:
            break
        excess = cells.work - target
        if movable.any():
            excess[movable] -= excess[movable].mean()
        falling = np.argsort(-excess, kind="stable")
        # After a round without gain every cell is paired with another one.
        shift = no_gain * max(1, num_pairs // (PATIENCE + 1))
        first, second = falling[:num_pairs], falling[-1 - (np.arange(num_pairs) + shift) % num_pairs]
        transfer = (excess[first] - excess[second]) / 2
        swaps = best_swaps(cells, first, second, transfer, turn)
        swaps.select(swaps.residual < transfer * (1 - 1e-9)).apply(cells)
        cost = cells.lockstep_cost
        no_gain = 0 if cost < best * (1 - LEAST_GAIN) else no_gain + 1
        if cost < best:
            best, best_members = cost, cells.members.copy()
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
    for turn in range(attempts):
        if best <= good_enough or no_gain >= cells.num_steps or len(cells.work) < 2:
            break
        most_expensive, excess = _excess_over_others(cells, no_gain)
        others = np.delete(np.arange(len(excess)), most_expensive)
        transfer = (excess[most_expensive] - excess[others]) / 2
        swaps = best_swaps(cells, np.full(len(others), most_expensive), others, transfer, turn)
        # [P] excess, after the swap, of whichever of the two cells then exceeds its limit more
        larger_excess = swaps.residual + (excess[most_expensive] + excess[others]) / 2
        before = cells.members.copy()
        swaps.select(larger_excess.argmin(keepdims=True)).apply(cells)
        cost = cells.lockstep_cost
        if cost < best * (1 - LEAST_GAIN):
            best, no_gain = cost, 0
        else:
            cells.members, no_gain = before, no_gain + 1
            cells.update_sums()
    return best


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


def _candidates(cells: Cells, rows: Ints, num_candidates: int, turn: int) -> NDArray[np.int32]:
    """[P] cells -> [P, w] samples evenly spaced in each, different ones every turn; n where a cell has fewer."""
    members = cells.members[rows]
    if members.shape[1] <= num_candidates:
        return members
    size = np.maximum((members < len(cells.cost) - 1).sum(axis=1), num_candidates)[:, None]
    column = (np.arange(num_candidates) * size // num_candidates + turn) % size
    candidates: NDArray[np.int32] = members[np.arange(len(rows))[:, None], column]
    return candidates


@cache
def _subsets(width: int) -> tuple[NDArray[np.bool_], Floats]:
    """All subsets of at most two of ``width`` items: [K, width] bool, and the transpose as float64."""
    choices = [chosen for size in range(3) for chosen in combinations(range(width), size)]
    table = np.zeros((len(choices), width), bool)
    for row, chosen in enumerate(choices):
        table[row, list(chosen)] = True
    return table, np.ascontiguousarray(table.T, np.float64)
