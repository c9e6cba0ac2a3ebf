"""Laws of the prompt order: each pass holds each row once, and one number resumes it anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.core.errors import CheckpointError
from rlmodule.data.stream import PromptStream


def rows(pairs):
    return [row for _, row in pairs]


@given(size=st.integers(1, 50), seed=st.integers(-(2**70), 2**70), passes=st.integers(1, 4))
def test_every_pass_holds_every_row_once(size, seed, passes):
    order = rows(PromptStream(size, seed).take(size * passes))
    for number in range(passes):
        assert sorted(order[number * size : (number + 1) * size]) == list(range(size))


@given(takes=st.lists(st.integers(0, 30), max_size=8))
def test_the_order_does_not_depend_on_how_it_is_taken(takes):
    stream = PromptStream(11, seed=5)
    taken = [pair for count in takes for pair in stream.take(count)]
    assert taken == PromptStream(11, seed=5).take(sum(takes))


def test_passes_and_seeds_have_orders_of_their_own():
    stream = PromptStream(100, seed=0)
    orders = [rows(stream.take(100)) for _ in range(3)] + [rows(PromptStream(100, seed=1).take(100))]
    assert len({tuple(order) for order in orders}) == 4
    assert rows(PromptStream(100, seed=0, shuffle=False).take(200)) == [*range(100)] * 2


def test_the_order_of_a_seed_is_fixed_for_ever():
    """Checkpoints hold a position only, so a version that orders otherwise would resume with other rows."""
    assert rows(PromptStream(8, seed=0).take(16)) == [0, 2, 1, 5, 4, 3, 6, 7, 5, 3, 7, 2, 4, 1, 0, 6]


@given(runs=st.lists(st.integers(0, 25), min_size=1, max_size=5))
def test_interrupted_any_number_of_times_equals_uninterrupted(runs):
    whole = PromptStream(7, seed=3).take(sum(runs))
    pieces, state = [], PromptStream(7, seed=3).state_dict()
    for count in runs:
        stream = PromptStream(7, seed=3)
        stream.load_state_dict(state)
        pieces += stream.take(count)
        state = stream.state_dict()
    assert pieces == whole


def test_a_row_that_comes_twice_in_one_call_gets_two_counters():
    taken = PromptStream(2, seed=0).take(5)
    assert [counter for counter, _ in taken] == [0, 1, 2, 3, 4]
    assert len(set(rows(taken))) == 2


@pytest.mark.parametrize(("size", "seed", "shuffle"), [(8, 0, True), (7, 1, True), (7, 0, False)])
def test_a_position_in_another_order_is_refused(size, seed, shuffle):
    state = PromptStream(7, seed=0).state_dict()
    with pytest.raises(CheckpointError, match="Resume with the data and the seed"):
        PromptStream(size, seed, shuffle).load_state_dict(state)
