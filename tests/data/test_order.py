"""Laws of orders: a function of seed and counter alone, every pass whole, shares kept, easy rows first."""

import numpy as np
import pytest

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.data.config import DataConfig
from rlmodule.data.order import BLOCK, RowOrder, build_order, order_of
from rlmodule.data.rows import TableRows
from rlmodule.data.stream import PromptStream
from rlmodule.data.tables import MemoryTable

MIXED = RowOrder((30, 7, 500), weights=(3, 1, 0.5))


def drawn(order, count, seed=0, shuffle=True, start=0):
    built = build_order(order, seed, shuffle)
    return [built.row(counter) for counter in range(start, start + count)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("order", [MIXED, RowOrder((9,), values=np.arange(9.0) // 3), RowOrder((9,), values=np.ones(9), stages=2)])  # fmt: skip
def test_the_row_depends_on_the_counter_alone(order, shuffle):
    """So one number resumes it: also in the middle of a block and of a pass."""
    whole = drawn(order, 2 * BLOCK + 5, shuffle=shuffle)
    assert whole[BLOCK - 3 : BLOCK + 40] == drawn(order, 43, shuffle=shuffle, start=BLOCK - 3)
    assert (whole == drawn(order, 2 * BLOCK + 5, seed=1, shuffle=shuffle)) is not shuffle


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_stretch_has_the_shares_of_the_weights(shuffle):
    parts = np.searchsorted([30, 37], drawn(MIXED, 3 * BLOCK, shuffle=shuffle), side="right")
    shares = np.array([3, 1, 0.5]) / 4.5
    for first in range(0, 3 * BLOCK, 50):
        found = np.bincount(parts[first : first + 50], minlength=3)
        assert np.abs(found - 50 * shares).max() <= 2, "to a row at either end"
    whole = np.bincount(parts[:BLOCK], minlength=3)
    assert np.abs(whole - BLOCK * shares).max() < 1


def test_each_part_of_a_mixture_comes_pass_by_pass():
    rows = drawn(MIXED, 3 * BLOCK)
    second = [row for row in rows if 30 <= row < 37]
    for first in range(0, len(second) - 7, 7):
        assert sorted(second[first : first + 7]) == list(range(30, 37))


def test_ranks_that_take_every_nth_row_see_every_part():
    """Two equal parts in turns would give each of two ranks one of them."""
    rows = drawn(RowOrder((50, 50), weights=(1, 1)), BLOCK)
    for rank in (0, 1):
        share = np.mean([row < 50 for row in rows[rank::2]])
        assert 0.4 < share < 0.6


def test_a_part_of_next_to_no_weight_still_comes():
    rows = drawn(RowOrder((5, 5), weights=(1, 1e-9)), BLOCK)
    assert sum(row >= 5 for row in rows) == 1


def test_a_curriculum_ascends_in_every_pass_and_shuffles_equals():
    values = np.array([2, 0, 1, 0, 2, 1, 0], dtype=np.float64)
    rows = drawn(RowOrder((7,), values=values), 14 * 4)
    passes = [rows[first : first + 7] for first in range(0, len(rows), 7)]
    for one in passes:
        assert sorted(one) == list(range(7))
        assert values[one].tolist() == sorted(values)
    assert len({tuple(one) for one in passes}) > 1, "equally easy rows come in another order in another pass"
    assert drawn(RowOrder((7,), values=values), 7, shuffle=False) == [1, 3, 6, 2, 5, 0, 4]


def test_stages_are_of_equal_size_and_shuffled_inside():
    values = np.arange(20)[::-1].astype(np.float64)
    rows = drawn(RowOrder((20,), values=values, stages=2), 20)
    assert sorted(values[rows[:10]]) == list(range(10))
    assert values[rows[:10]].tolist() != sorted(values[rows[:10]])


def test_one_part_without_values_is_the_order_there_always_was():
    stream = PromptStream(8, seed=0, order=RowOrder((8,)))
    assert [row for _, row in stream.take(16)] == [0, 2, 1, 5, 4, 3, 6, 7, 5, 3, 7, 2, 4, 1, 0, 6]


def test_a_stream_ends_at_its_limit():
    stream = PromptStream(5, seed=0, limit=8)
    assert [len(stream.take(3)) for _ in range(4)] == [3, 3, 2, 0]
    assert stream.consumed == 8


def rows_of(*values, **config):
    tables = [MemoryTable(f"{i}.jsonl", [{"level": value} for value in part]) for i, part in enumerate(values)]
    files = [table.name for table in tables]
    return TableRows([[table] for table in tables]), DataConfig(train_files=files, **config)


def test_parts_are_what_is_left_of_each_entry():
    rows, config = rows_of([1, 2, 3], [4, 5], weights=[1, 2], curriculum="level")
    order = order_of(rows, np.array([0, 2, 3]), config)
    assert (order.sizes, order.weights, order.values.tolist()) == ((2, 1), (1, 2), [1, 3, 4])
    with pytest.raises(DataError, match=r"1\.jsonl: no row of it is in use"):
        order_of(rows, np.array([0, 2]), config)


@pytest.mark.parametrize(
    ("value", "number"), [(3, 3.0), (0.5, 0.5), ("7", 7.0), ("Level 4", 4.0), ("-2.5", -2.5), (" Level: 5 ", 5.0)]
)
def test_numbers_may_stand_behind_a_word(value, number):
    rows, _ = rows_of([value])
    assert rows.numbers("level").tolist() == [number]


@pytest.mark.parametrize("value", [None, "easy", "49+97", "at 5 pm 3", True, [1], float("nan"), 10**400, "9" * 400])
def test_a_row_without_a_number_is_named(value):
    rows, _ = rows_of([1], [2, value])
    with pytest.raises(DataError, match=r"1\.jsonl:2: column 'level', which orders rows, holds .* and no number"):
        rows.numbers("level")
    with pytest.raises(DataError, match=r"there is no column 'hard' to order rows by; its columns are level"):
        rows.numbers("hard")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"weights": [1]}, "there are 1 of them, and train_files has 2 entries"),
        ({"weights": [1, 0]}, "must be greater than 0"),
        ({"curriculum_stages": 2}, "no column says what is easy"),
        ({"curriculum_stages": 0, "curriculum": "level"}, "must be at least 1"),
        ({"overlong_demonstration": "filter"}, "there is no limit"),
        ({"overlong_demonstration": "drop"}, "error, filter, truncate"),
        ({"turn_marks": {"H:": "human"}}, "assistant, system, tool, user"),
    ],
)
def test_keys_that_say_nothing_are_refused(keys, says):
    with pytest.raises(ConfigError, match=says):
        DataConfig(train_files=["a", "b"], **keys)
