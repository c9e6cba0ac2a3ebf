"""Laws of the joint planner's local search, with swaps tried one by one as the yardstick."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.batching import local_search
from rlmodule.batching.initial_packings import Problem, water_filled
from rlmodule.batching.local_search import Cells, best_swaps, cost_after, improve, refine


@st.composite
def packings(draw):
    """Two to four cells per micro-step within the budget, with at most six samples each: all of them are candidates."""
    num_steps, dp_size = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    held = draw(st.lists(st.lists(st.integers(1, 20), max_size=6), min_size=num_steps * dp_size).filter(any))
    held = held[: num_steps * dp_size]
    length = np.array([tokens for cell in held for tokens in cell], np.int64)
    cell = np.repeat(np.arange(len(held)), [len(samples) for samples in held])
    falling = np.argsort(-length, kind="stable")
    budget = max(map(sum, held)) + draw(st.integers(0, 10))
    problem = Problem((24.0 * length + length**2)[falling], length[falling], dp_size, max(budget, 1))
    return problem, cell[falling], num_steps


def samples_of(cells, cell):
    return [sample for sample in cells.members[cell].tolist() if sample != cells.none]


def every_swap(cells, first, second):
    """Cost that moves from first to second by every swap of at most two samples each way that keeps to the budget."""
    cost, tokens = cells.values
    at_most_two = [
        [list(chosen) for size in range(3) for chosen in combinations(samples_of(cells, cell), size)]
        for cell in (first, second)
    ]
    for given_away, taken in product(*at_most_two):
        net = tokens[given_away].sum() - tokens[taken].sum()
        if max(cells.used[first] - net, cells.used[second] + net) <= cells.token_budget:
            yield cost[given_away].sum() - cost[taken].sum()


@settings(max_examples=60, deadline=None)
@given(packings(), st.integers(0, 2000))
def test_the_best_swap_is_the_best_of_all_within_the_budget(packing, wanted):
    cells = Cells(*packing)
    pairs = np.arange(len(cells.work) // 2 * 2).reshape(2, -1)
    swaps = best_swaps(cells, pairs, np.full(pairs.shape[1], float(wanted)), turn=0)
    for (first, second), residual in zip(pairs.T.tolist(), swaps.residual.tolist(), strict=True):
        assert residual == min(abs(moved - wanted) for moved in every_swap(cells, first, second))


@settings(max_examples=60, deadline=None)
@given(packings())
def test_swaps_move_what_they_say_and_lose_nothing(packing):
    problem, cell, num_steps = packing
    cells = Cells(problem, cell, num_steps)
    pairs = np.arange(len(cells.work) // 2 * 2).reshape(2, -1)
    before, transfer = cells.work.copy(), np.full(pairs.shape[1], 30.0)
    swaps = best_swaps(cells, pairs, transfer, turn=0)
    swaps.apply(cells, np.arange(pairs.shape[1]))
    held = [sample for row in range(len(cells.work)) for sample in samples_of(cells, row)]
    assert sorted(held) == list(range(len(cell)))
    assert (cells.used <= problem.token_budget).all()
    np.testing.assert_array_equal(cells.work, [problem.cost[samples_of(cells, c)].sum() for c in range(len(before))])
    np.testing.assert_array_equal(np.abs(before[pairs[0]] - cells.work[pairs[0]] - transfer), swaps.residual)


@settings(max_examples=60, deadline=None)
@given(packings(), st.integers(0, 2000))
def test_the_cost_after_a_swap_is_known_before_it(packing, wanted):
    cells = Cells(*packing)
    swaps = best_swaps(cells, np.array([[0], [1]]), np.array([float(wanted)]), turn=0)
    expected = cost_after(cells, swaps, np.array([0]))
    swaps.apply(cells, np.array([0]))
    assert cells.lockstep_cost == expected


@pytest.mark.parametrize("limit", [local_search.SWAPS_IN_CACHE, 1])
@settings(max_examples=40, deadline=None)
@given(packing=packings())
def test_the_search_keeps_the_budget_and_gives_the_cost_it_reached(limit, packing):
    """Also where so many swaps are tried that they are held in parts."""
    problem, cell, num_steps = packing
    cells = Cells(problem, cell, num_steps)
    start = cells.lockstep_cost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_search, "SWAPS_IN_CACHE", limit)
        improved = improve(cells, water_filled(problem, num_steps), 12, 0.0)
        assert improved == cells.lockstep_cost <= start
        refined = refine(cells, 12, 0.0)
    assert refined == cells.lockstep_cost <= improved
    tokens = np.bincount(cells.cell_of_sample(), weights=problem.length, minlength=len(cells.work))
    assert tokens.max() <= problem.token_budget
