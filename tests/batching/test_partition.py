"""Laws of number partitioning; the definition, written plainly, is the yardstick."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner import differenced_as_defined
from rlmodule.batching.partition import balanced_counts, karmarkar_karp

COSTS = st.lists(st.integers(0, 12) | st.floats(0, 1e12), max_size=40)
PARTS = st.integers(1, 9)


def sums(costs, parts):
    return [sum(costs[item] for item in part) for part in parts]


@settings(max_examples=200, deadline=None)
@given(COSTS, PARTS)
def test_free_sizes_follow_the_definition(costs, num_parts):
    assert karmarkar_karp(costs, num_parts) == differenced_as_defined(costs, num_parts)


@settings(max_examples=200, deadline=None)
@given(COSTS, PARTS)
def test_equal_sizes_follow_the_definition(costs, num_parts):
    costs = costs[: len(costs) // num_parts * num_parts]
    assert karmarkar_karp(costs, num_parts, equal_size=True) == differenced_as_defined(costs, num_parts, True)


@settings(max_examples=100, deadline=None)
@given(COSTS, PARTS)
def test_every_item_is_in_one_part_and_no_part_is_empty_for_want_of_items(costs, num_parts):
    for parts in (karmarkar_karp(costs, num_parts), balanced_counts(costs, num_parts)):
        assert sorted(item for part in parts for item in part) == list(range(len(costs)))
        assert len(parts) == num_parts
        assert sum(bool(part) for part in parts) == min(num_parts, len(costs))


@settings(max_examples=100, deadline=None)
@given(COSTS, PARTS)
def test_balanced_counts_differ_by_at_most_one(costs, num_parts):
    sizes = [len(part) for part in balanced_counts(costs, num_parts)]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), PARTS)
def test_spread_is_at_most_the_largest_cost(costs, num_parts):
    for parts in (karmarkar_karp(costs, num_parts), balanced_counts(costs, num_parts)):
        assert max(sums(costs, parts)) - min(sums(costs, parts)) <= max(costs)


def test_wide_states_follow_the_definition():
    """Merges of many sets at once take another path than those of a few."""
    costs = np.random.default_rng(0).integers(0, 5, 300).tolist()
    for num_parts in (20, 64):
        assert karmarkar_karp(costs, num_parts) == differenced_as_defined(costs, num_parts)


def test_parts_come_by_falling_sum():
    costs = [5, 1, 9, 2, 6, 5]
    parts = sums(costs, karmarkar_karp(costs, 3))
    assert parts == sorted(parts, reverse=True)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_any_kind_of_numbers_gives_the_same_parts(kind):
    assert karmarkar_karp(kind([8, 7, 6, 5, 4]), 2) == [[1, 3, 4], [0, 2]]


def test_unequal_counts_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"num_parts=2 items, got 7.*balanced_counts"):
        karmarkar_karp([9, 8, 7, 6, 5, 4, 3], 2, equal_size=True)


@pytest.mark.parametrize("costs", [[1.0, float("nan")], [1.0, float("inf")], [-1.0, 2.0]])
def test_costs_that_are_no_costs_are_refused(costs):
    with pytest.raises(ValueError, match="finite"):
        karmarkar_karp(costs, 2)
