"""The joint planner with rows that several ranks share: where one long sample would keep all ranks waiting, neighbours
compute it together by exchanging heads (Ulysses), while the others compute rows of their own.

It takes the plan of ``joint.py``, in which each rank has its own rows, unless a packing with shared ones is cheaper. A
sample that is longer than the budget of a rank has no other way.
"""

from __future__ import annotations

from rlmodule.batching.joint import MIN_SAVING, plan_joint
from rlmodule.batching.packing import Packing, least_steps
from rlmodule.batching.partition import Ints, by_falling_cost
from rlmodule.batching.wide_packings import WideCells, WideProblem, first_packing
from rlmodule.batching.wide_search import improve
from rlmodule.batching.workload import Exchange, Floats

# Excess over the ideal: under ENOUGH the plan without shared rows is taken, under GOOD no other packing is searched.
ENOUGH, GOOD = 0.01, 0.004
# Heights are planned with so much slack: with little, few cells hold all that is tall and the rest may not fit.
SLACKS = (1.0, 1.03, 1.1, 1.25, 1.6)
# Packings that are searched, the cheapest first; and numbers of micro-steps with a packing that are tried.
SEARCHED, STEPS_TRIED = 4, 2


def plan_wide(
    cost: Floats,
    length: Ints,
    dp_size: int,
    token_budget: int,
    step_cost: float = 0.0,
    multiple_of: int = 1,
    min_steps: int = 1,
    *,
    widest: int,
    exchange: Exchange,
) -> Packing:
    """Pack a mini-batch with small lock-step cost, never above that of ``plan_joint``.

    Args:
        cost, length: [n] cost and tokens of each sample; none is longer than ``token_budget * widest``.
        dp_size: data ranks.
        token_budget: most tokens of a row on one rank; a row that g ranks share has at most g times as many.
        step_cost, multiple_of, min_steps: as in ``plan_joint``.
        widest: most ranks that share a row, a power of two that divides ``dp_size``.
        exchange: what sharing a row costs.

    Returns:
        The packing of ``plan_joint``, to the digit, unless shared rows save more than MIN_SAVING of it.
    """
    alone = None
    if int(length.max()) <= token_budget:
        alone = plan_joint(cost, length, dp_size, token_budget, step_cost, multiple_of, min_steps)
        if _cost_of(alone, cost, step_cost, exchange) <= float(cost.sum()) / dp_size * (1 + ENOUGH):
            return alone
    order = by_falling_cost(cost)
    problem = WideProblem(cost[order], length[order], dp_size, token_budget, widest, exchange)
    cells = _best_cells(problem, step_cost, multiple_of, least_steps(min_steps, len(cost), dp_size))
    wide = cells.packing(order).with_balanced_ranks(cost)
    if alone is None:
        return wide
    assert wide.widths is not None, "cells have widths"
    if not (wide.widths > 1).any():
        return alone
    limit = _cost_of(alone, cost, step_cost, exchange) * (1 - MIN_SAVING)
    return wide if _cost_of(wide, cost, step_cost, exchange) < limit else alone


def _cost_of(packing: Packing, cost: Floats, step_cost: float, exchange: Exchange) -> float:
    """Lock-step cost with that of the micro-steps themselves."""
    return float(packing.heights(cost, exchange).max(axis=1).sum()) + step_cost * packing.num_steps


def _best_cells(problem: WideProblem, step_cost: float, multiple_of: int, min_steps: int) -> WideCells:
    goal = problem.ideal * (1 + GOOD)
    total = lambda cells: cells.lockstep_cost + step_cost * cells.num_steps  # noqa: E731
    found = _first_packings(problem, goal, multiple_of, min_steps)
    searched = sorted(found, key=total)[:SEARCHED]
    for cells in searched:
        if improve(cells, goal) <= goal:
            return cells
    return min(searched, key=total)


def _first_packings(problem: WideProblem, goal: float, multiple_of: int, min_steps: int) -> list[WideCells]:
    """Packings with the fewest micro-steps that have any, and with the next number where those are above the goal."""
    found, with_any = list[WideCells](), 0
    num_steps = max(problem.fewest_steps(), min_steps)
    num_steps += -num_steps % multiple_of
    # Terminates: with as many micro-steps as samples every sample has a cell of its own.
    while with_any < STEPS_TRIED and not any(cells.lockstep_cost <= goal for cells in found):
        packed = [
            cells
            for widest in dict.fromkeys([*problem.widths[::-1][::2], 1])
            for slack in SLACKS
            if (cells := first_packing(problem, num_steps, widest, slack)) is not None
        ]
        found, with_any, num_steps = found + packed, with_any + bool(packed), num_steps + multiple_of
    return found
