"""Merging: any cut and any order give the numbers of the whole, and nothing is decided by a name."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.core.metrics import (
    Metric,
    ReduceType,
    array_std,
    from_rows,
    maximum_of,
    mean_of,
    merge,
    merge_rows,
    minimum_of,
    ratio,
    to_rows,
    total,
)

PARTS = st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=5), min_size=1, max_size=6)


def of_part(values):
    x = torch.tensor(values, dtype=torch.float32)
    return {
        "mean": mean_of(x),
        "smallest": minimum_of(x),
        "largest": maximum_of(x),
        "sum": total(x.double().sum()),
        "above_zero": ratio((x > 0).sum(), float(len(values))),
    }


@given(PARTS, st.randoms())
def test_any_cut_in_any_order_gives_the_numbers_of_the_whole(parts, random):
    whole = [v for part in parts for v in part]
    random.shuffle(parts)
    merged = {name: metric.result for name, metric in merge(of_part(p) for p in parts).items()}
    assert merged["sum"] == pytest.approx(math.fsum(whole), rel=1e-9, abs=1e-6)
    if not whole:
        assert all(math.isnan(merged[name]) for name in ("mean", "smallest", "largest", "above_zero"))
        return
    assert merged["mean"] == pytest.approx(math.fsum(whole) / len(whole), rel=1e-9, abs=1e-6)
    assert merged["smallest"] == min(whole)
    assert merged["largest"] == max(whole)
    assert merged["above_zero"] == sum(v > 0 for v in whole) / len(whole)


@given(PARTS)
def test_rows_carry_everything_a_merge_needs(parts):
    """Merging after a trip through rows, as between ranks, equals merging before it."""
    direct = merge(of_part(p) for p in parts)
    travelled = merge(from_rows(*to_rows(of_part(p))) for p in parts)
    assert {n: m.reduce for n, m in travelled.items()} == {n: m.reduce for n, m in direct.items()}
    for name, metric in direct.items():
        assert travelled[name].result == pytest.approx(metric.result, rel=1e-12, abs=1e-12, nan_ok=True)


def test_rows_are_sorted_float64_and_may_be_none():
    names, rows = to_rows({"b": total(2.0), "a": ratio(torch.tensor(3), 4)})
    assert names == ["a", "b"]
    assert rows.dtype == torch.float64
    assert rows.tolist() == [[3, 4, ReduceType.MEAN], [2, 1, ReduceType.SUM]]
    assert to_rows({})[1].shape == (0, 3)


def test_a_key_that_some_parts_lack_is_merged_over_the_others():
    merged = merge([{"a": ratio(1.0, 2.0)}, {"b": total(5.0)}, {"a": ratio(2.0, 2.0)}])
    assert merged["a"].result == 0.75
    assert merged["b"].result == 5


def test_names_decide_nothing():
    """terminated holds min, minibatch holds min, max_len holds max: all are means here."""
    for name in ("terminated", "minibatch", "max_len", "pg_loss"):
        assert merge([{name: ratio(1.0, 1.0)}, {name: ratio(3.0, 1.0)}])[name].result == 2


def test_one_key_cannot_be_merged_in_two_ways():
    with pytest.raises(ValueError, match="metric a is merged as SUM and as MEAN"):
        merge([{"a": total(1.0)}, {"a": ratio(1.0, 1.0)}])


@pytest.mark.parametrize(
    "make",
    [
        total,
        lambda v: ratio(v, 1.0),
        lambda v: Metric(v, 1.0, ReduceType.MIN),
        lambda v: Metric(v, 1.0, ReduceType.MAX),
    ],
)
def test_nan_stays_nan(make):
    for order in ([math.nan, 1.0], [1.0, math.nan]):
        assert math.isnan(merge({"a": make(v)} for v in order)["a"].result)


def test_a_single_extremum_is_kept_to_the_last_digit():
    assert merge([{"a": Metric(0.1, 1.0, ReduceType.MAX)}, {"a": Metric(-0.3, 1.0, ReduceType.MAX)}])["a"].result == 0.1


def test_metrics_hold_no_graph():
    loss = torch.randn(3, requires_grad=True).sum()
    for metric in (total(loss), ratio(loss, loss.exp()), mean_of(loss.reshape(1)), maximum_of(loss.reshape(1))):
        for number in (metric.value, metric.weight):
            assert not (isinstance(number, torch.Tensor) and number.requires_grad)


def test_whether_any_part_saw_data():
    nothing = torch.zeros(0)
    assert not any(m.saw_data for m in (mean_of(nothing), minimum_of(nothing), ratio(0.0, 0.0)))
    assert mean_of(torch.ones(2)).saw_data
    assert total(0.0).saw_data, "a share of 0 is a number"


@given(PARTS)
def test_metrics_of_ranks_merged_at_once_are_those_merged_one_by_one(parts):
    """To the bit, also where a rank saw nothing or NaN."""
    tables = [to_rows(of_part(values)) for values in (*parts, [math.nan, 1.0])]
    names = tables[0][0]
    one_by_one = merge(from_rows(names, rows) for _, rows in tables)
    at_once = merge_rows(names, torch.stack([rows for _, rows in tables]))
    for name in names:
        mine, wanted = at_once[name], one_by_one[name]
        assert mine.reduce is wanted.reduce
        assert (str(mine.result), float(mine.weight)) == (str(wanted.result), float(wanted.weight))


def test_ranks_that_disagree_on_how_to_merge_are_refused_with_the_name():
    rows = torch.tensor([[[1.0, 1.0, ReduceType.MEAN]], [[1.0, 1.0, ReduceType.MAX]]], dtype=torch.float64)
    with pytest.raises(ValueError, match="metric x is merged as MEAN and as MAX"):
        merge_rows(["x"], rows)


@pytest.mark.parametrize("number", [0.1, 0.7, 1e9 + 0.1])
def test_equal_numbers_have_no_deviation_at_all(number):
    assert [array_std(np.full(count, number)) for count in range(1, 20)] == [0.0] * 19
    assert array_std(np.array([number, number + 2])) == pytest.approx(1)
