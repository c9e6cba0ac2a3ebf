"""The joint planner: ranks and micro-steps of a mini-batch at once, against the time ranks wait for each other.

Several first packings are made (``initial_packings.py``) and levelled a little (``local_search.py``); the best is
levelled on. All numbers below are tuned on ``benchmarks/planner_cases.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import numpy as np

from rlmodule.batching.initial_packings import (
    Problem,
    Targets,
    best_fit,
    fill_by_tokens,
    water_filled,
    worst_fit,
)
from rlmodule.batching.local_search import Cells, improve, refine
from rlmodule.batching.packing import Packing
from rlmodule.batching.partition import Ints, by_falling_cost
from rlmodule.batching.workload import Floats

# Over the bound by this part is as good as level: clocks and kernels of real ranks differ by more. A packing that is
# near after its trial is levelled further at once, before others are tried.
GOOD_ENOUGH, NEAR = 7e-4, 3e-3
# First packings in the order they are tried, with the tilt of their heights.
FILLINGS = (
    (worst_fit, 0.0),
    (fill_by_tokens, 0.0),
    (best_fit, 0.16),
    (worst_fit, 0.12),
    (worst_fit, 0.25),
    (worst_fit, 0.4),
)
# Rounds of levelling for every packing, for one that is near, for the best; and attempts to polish the best.
TRIAL_ROUNDS, NEAR_ROUNDS, ROUNDS, ATTEMPTS = 4, 12, 40, 40
# With more cells than this only the quick filling is tried and nothing is polished: many samples level by themselves.
MANY_CELLS = 10_000
# One micro-step more is tried when the cells are this full and the plan is this far from the bound, and taken when it
# saves that part of the cost.
FULL, FAR, WORTH_A_STEP = 0.97, 0.01, 0.002


def plan_joint(
    cost: Floats, length: Ints, dp_size: int, token_budget: int, step_cost: float = 0.0, multiple_of: int = 1
) -> Packing:
    """Pack a mini-batch so that the micro-steps, each as dear as its dearest micro-batch, cost little together.

    Args:
        cost, length: [n] cost and tokens of each sample; none is longer than the budget.
        dp_size: data ranks.
        token_budget: most tokens of one micro-batch.
        step_cost: price of a micro-step, in the unit of ``cost``.
        multiple_of: the number of micro-steps is a multiple of this.

    Returns:
        The packing; dearer cells of a micro-step are on ranks that had less work so far.
    """
    order = by_falling_cost(cost)
    problem = Problem(cost[order], length[order], dp_size, token_budget)
    cells = _best_cells(problem, step_cost, multiple_of)
    cell = np.empty(len(cost), np.int64)
    cell[order] = cells.cell_of_sample()
    return Packing(cell, cells.num_steps, dp_size).with_ranks_evened(cost)


def _best_cells(problem: Problem, step_cost: float, multiple_of: int) -> Cells:
    num_steps = problem.fewest_steps()
    num_steps += -num_steps % multiple_of
    # Ends: with as many micro-steps as samples every sample finds an empty cell.
    while (cells := _packed(problem, num_steps)) is None:
        num_steps += multiple_of
    far = cells.lockstep_cost > problem.least_cost(num_steps) * (1 + FAR)
    if far and problem.fullness(num_steps) > FULL:
        looser = _packed(problem, num_steps + multiple_of)
        fixed_cost = step_cost * multiple_of + WORTH_A_STEP * cells.lockstep_cost
        if looser is not None and looser.lockstep_cost + fixed_cost < cells.lockstep_cost:
            return looser
    return cells


def _packed(problem: Problem, num_steps: int) -> Cells | None:
    """The best packing found with that many micro-steps; None when none was found."""
    least = problem.least_cost(num_steps)
    goal = least * (1 + GOOD_ENOUGH)
    tried: list[tuple[float, int, Cells, Targets]] = []
    for targets, cell in _initial_packings(problem, num_steps):
        cells = Cells(problem, cell, num_steps)
        reached = improve(cells, targets, TRIAL_ROUNDS, goal)
        if reached <= least * (1 + NEAR):
            reached = improve(cells, targets, NEAR_ROUNDS, goal)
        if reached <= goal:
            return cells
        tried.append((reached, len(tried), cells, targets))
    if not tried:
        return None
    _, _, cells, targets = min(tried, key=itemgetter(0, 1))
    improve(cells, targets, ROUNDS, goal)
    if num_steps * problem.dp_size <= MANY_CELLS:
        refine(cells, ATTEMPTS, goal)
    return cells


def _initial_packings(problem: Problem, num_steps: int) -> Iterator[tuple[Targets, Ints]]:
    many = num_steps * problem.dp_size > MANY_CELLS
    seen = set()
    for fill, tilt in FILLINGS:
        targets = water_filled(problem, num_steps, tilt)
        what = (fill, targets.target.tobytes())
        if what in seen or (many and fill is not worst_fit):
            continue
        seen.add(what)
        cell = fill(problem, targets)
        if cell is not None:
            yield targets, cell
