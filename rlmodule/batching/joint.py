"""The joint planner: assigns the samples of a mini-batch to ranks and micro-steps together.

It minimises the lock-step cost, because in every micro-step all ranks wait for the most expensive micro-batch. Several
initial packings (``initial_packings.py``) are improved for a few rounds (``local_search.py``); the best one is improved
further. All constants below are tuned on ``benchmarks/planner_cases.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import numpy as np

from rlmodule.batching.full_budgets import fullest_first
from rlmodule.batching.initial_packings import (
    Problem,
    Targets,
    best_fit,
    fill_by_tokens,
    water_filled,
    worst_fit,
)
from rlmodule.batching.local_search import Cells, improve, refine
from rlmodule.batching.many_cells import worst_fit_in_batches
from rlmodule.batching.packing import Packing, least_steps
from rlmodule.batching.partition import Ints, by_falling_cost
from rlmodule.batching.workload import Floats

# Excess over the lower bound, as a share of it. Below GOOD_ENOUGH the search stops, because clocks and kernels of real
# ranks differ by more. A packing below NEAR after its trial is improved further before others are tried.
GOOD_ENOUGH, NEAR = 7e-4, 3e-3
# Over the number of samples this is enough as well: combinations of a few samples that come nearer are rare.
FEW_SAMPLES = 0.14
# A cost that is above a lower bound by no more than this share is the least there is.
ROUNDING = 1e-12
# Initial packings in the order they are tried, with the tilt of their targets.
HEURISTICS = (
    (worst_fit, 0.0),
    (fill_by_tokens, 0.0),
    (best_fit, 0.16),
    (worst_fit, 0.12),
    (worst_fit, 0.25),
    (worst_fit, 0.4),
)
# Rounds of ``improve`` for every packing, for one that is NEAR, for the best; and attempts of ``refine`` on the best.
TRIAL_ROUNDS, NEAR_ROUNDS, ROUNDS, ATTEMPTS = 4, 12, 40, 40
# With more cells than this the first packing found is improved for a few rounds and kept: with many samples it is close
# to the bound, or one that long samples set, and each round takes long.
MANY_CELLS, GOOD_ENOUGH_OF_MANY = 10_000, 1.5e-3
# One more micro-step is tried if the cells are fuller than FULL and the cost exceeds the lower bound by more than FAR;
# it is kept if it saves more than MIN_SAVING of the cost.
FULL, FAR, MIN_SAVING = 0.97, 0.01, 0.002


def plan_joint(
    cost: Floats,
    length: Ints,
    dp_size: int,
    token_budget: int,
    step_cost: float = 0.0,
    multiple_of: int = 1,
    min_steps: int = 1,
) -> Packing:
    """Pack a mini-batch with small lock-step cost: the sum over micro-steps of their most expensive micro-batch.

    Args:
        cost, length: [n] cost and tokens of each sample; none is longer than the budget.
        dp_size: data ranks.
        token_budget: most tokens of one micro-batch.
        step_cost: fixed cost of a micro-step, in the unit of ``cost``.
        multiple_of: the number of micro-steps is a multiple of this.
        min_steps: micro-steps at least, where there are samples for as many.

    Returns:
        The packing; more expensive cells of a micro-step are on ranks with less work in the micro-steps before.
    """
    order = by_falling_cost(cost)
    problem = Problem(cost[order], length[order], dp_size, token_budget)
    cells = _best_cells(problem, step_cost, multiple_of, least_steps(min_steps, len(cost), dp_size))
    cell = np.empty(len(cost), np.int64)
    cell[order] = cells.cell_of_sample()
    return Packing(cell, cells.num_steps, dp_size).with_balanced_ranks(cost)


def _best_cells(problem: Problem, step_cost: float, multiple_of: int, min_steps: int) -> Cells:
    num_steps = max(problem.fewest_steps(), min_steps)
    num_steps += -num_steps % multiple_of
    # Terminates: with as many micro-steps as samples every sample has a cell of its own.
    while (cells := _best_packing(problem, num_steps)) is None:
        num_steps += multiple_of
    far = cells.lockstep_cost > problem.least_cost(num_steps) * (1 + FAR)
    if far and problem.fullness(num_steps) > FULL:
        looser = _best_packing(problem, num_steps + multiple_of)
        fixed_cost = step_cost * multiple_of + MIN_SAVING * cells.lockstep_cost
        if looser is not None and looser.lockstep_cost + fixed_cost < cells.lockstep_cost:
            return looser
    return cells


def _best_packing(problem: Problem, num_steps: int) -> Cells | None:
    """The best packing found with ``num_steps`` micro-steps; None when no heuristic finds one."""
    if num_steps * problem.dp_size > MANY_CELLS:
        return _packing_of_many(problem, num_steps)
    least = problem.least_cost(num_steps)
    is_level = least * problem.dp_size <= float(problem.cost.sum()) * (1 + NEAR)  # no sample sets the bound
    goal = least * (1 + max(GOOD_ENOUGH, FEW_SAMPLES / len(problem.cost) if is_level else 0.0))
    if num_steps == 1:
        goal = max(goal, problem.least_cost_of_pairs() * (1 + ROUNDING))
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
        full = fullest_first(problem, num_steps * problem.dp_size)
        if full is None:
            return None
        tried.append((0.0, 0, Cells(problem, full, num_steps), water_filled(problem, num_steps)))
    _, _, cells, targets = min(tried, key=itemgetter(0, 1))
    improve(cells, targets, ROUNDS, goal)
    refine(cells, ATTEMPTS, goal)
    return cells


def _packing_of_many(problem: Problem, num_steps: int) -> Cells | None:
    """A packing into more than MANY_CELLS cells; None when none is found."""
    for tilt in (tilt for fill, tilt in HEURISTICS if fill is worst_fit):
        targets = water_filled(problem, num_steps, tilt)
        cell = worst_fit_in_batches(problem, targets)
        if cell is None:
            cell = worst_fit(problem, targets)
        if cell is not None:
            cells = Cells(problem, cell, num_steps)
            improve(cells, targets, TRIAL_ROUNDS, problem.least_cost(num_steps) * (1 + GOOD_ENOUGH_OF_MANY))
            return cells
    return None


def _initial_packings(problem: Problem, num_steps: int) -> Iterator[tuple[Targets, Ints]]:
    seen = set()
    for fill, tilt in HEURISTICS:
        targets = water_filled(problem, num_steps, tilt)
        key = (fill, targets.target.tobytes())
        if key in seen:
            continue
        seen.add(key)
        cell = fill(problem, targets)
        if cell is not None:
            yield targets, cell
