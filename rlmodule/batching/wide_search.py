"""Search on packings with shared rows: the highest cell of a micro-step gives away or swaps a sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.partition import Ints
from rlmodule.batching.wide_packings import WideCells
from rlmodule.batching.workload import Floats

# Samples of the highest cell that are tried, the most expensive first.
CANDIDATES = 24
# A swap that saves less than this share of the micro-step's height is left.
LEAST_GAIN = 1e-5
# Rounds over all micro-steps, and swaps that are tried in all rounds together: a second of numpy.
ROUNDS, MOST_SWAPS = 60, 60_000_000


def improve(cells: WideCells, goal: float) -> float:
    """Lower the lock-step cost in place until it is at the goal or nothing is gained; returns what was reached."""
    swaps = CANDIDATES * cells.num_steps * (len(cells.cell) + len(cells.step))  # of a round
    for _ in range(min(ROUNDS, MOST_SWAPS // swaps)):
        gains = [_improve_step(cells, step) for step in range(cells.num_steps)]
        if not any(gains) or cells.lockstep_cost <= goal:
            break
    return cells.lockstep_cost


def _improve_step(cells: WideCells, step: int) -> bool:
    """The swap that lowers the micro-step most, counting what it raises in another one; False where none does."""
    height = cells.heights()
    highest = int(np.where(cells.step == step, height, -1.0).argmax())
    given = np.flatnonzero(cells.cell == highest)[:CANDIDATES]
    if not len(given):
        return False
    swap = _Swaps.of(cells, highest)
    saved = height[highest] - swap.new_heights(cells, height, highest, given)
    saved[~swap.fits(cells, highest, given)] = -np.inf
    row, column = np.unravel_index(int(saved.argmax()), saved.shape)
    if saved[row, column] <= LEAST_GAIN * height[highest]:
        return False
    if column < len(swap.taken):
        cells.cell[swap.taken[column]] = highest
    cells.cell[given[row]] = swap.other[column]
    return True


@dataclass(frozen=True, eq=False)
class _Swaps:
    """What the highest cell may get in exchange for a sample: one of another cell, or nothing.

    Args:
        taken: [Y] int64 samples of other cells.
        other: [Y + C] int64 cell that gives each of them, then every cell, which gives nothing.
        cost, length: [Y + C] of what is given.
    """

    taken: Ints
    other: Ints
    cost: Floats
    length: Ints

    @classmethod
    def of(cls, cells: WideCells, highest: int) -> _Swaps:
        """All of them."""
        count, taken = len(cells.step), np.flatnonzero(cells.cell != highest)
        return cls(
            taken,
            np.concatenate([cells.cell[taken], np.arange(count)]),
            np.concatenate([cells.problem.cost[taken], np.zeros(count)]),
            np.concatenate([cells.problem.length[taken], np.zeros(count, np.int64)]),
        )

    def fits(self, cells: WideCells, highest: int, given: Ints) -> NDArray[np.bool_]:
        """[X, Y + C] whether both cells stay within the budget if the sample ``given`` [X] goes."""
        tokens = np.bincount(cells.cell, cells.problem.length, len(cells.step))
        free = cells.problem.token_budget * cells.width - tokens
        grows = cells.problem.length[given][:, None] - self.length
        keeps: NDArray[np.bool_] = (grows <= free[self.other]) & (-grows <= free[highest]) & (self.other != highest)
        return keeps

    def new_heights(self, cells: WideCells, height: Floats, highest: int, given: Ints) -> Floats:
        """[X, Y + C] height of the micro-step of ``highest``, plus what the swap adds to another micro-step."""
        share, step = cells.problem.exchange.share(cells.width), cells.step[highest]
        second, third = _others(cells, height, highest)
        next_height = float(height[second]) if second >= 0 else 0.0
        moved = cells.problem.cost[given][:, None] - self.cost
        here = height[highest] - moved * share[highest]
        there = height[self.other] + moved * share[self.other]
        is_same = cells.step[self.other] == step
        rest = np.where(self.other == second, third, next_height)
        raised = np.maximum(there - cells.tops(height)[cells.step[self.other]], 0.0)
        within = np.maximum(np.maximum(here, there), rest)
        heights: Floats = np.where(is_same, within, np.maximum(here, next_height) + raised)
        return heights


def _others(cells: WideCells, height: Floats, highest: int) -> tuple[int, float]:
    """The second cell of the micro-step, -1 for none, and the height of the third."""
    mine = np.flatnonzero((cells.step == cells.step[highest]) & (np.arange(len(height)) != highest))
    falling = mine[np.argsort(-height[mine], kind="stable")]
    third = float(height[falling[1]]) if len(falling) > 1 else 0.0
    return (int(falling[0]), third) if len(falling) else (-1, 0.0)
