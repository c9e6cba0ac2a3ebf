"""Masked and grouped statistics: what does not count can hold anything."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.ops.masked import (
    group_statistics,
    masked_mean,
    masked_sum,
    place_at_end,
    select,
    whiten,
    whiten_by_tokens,
)

MASK = torch.tensor([[True, False, True], [False, True, False]])
DIRTY = torch.tensor([[1.0, torch.nan, 3.0], [torch.inf, 5.0, -torch.inf]])


def test_select_gives_the_loss_tokens_in_row_order():
    assert select(DIRTY, MASK).tolist() == [1, 3, 5]


def test_what_is_dropped_is_harmless_in_value_and_gradient():
    for reduce in (lambda x: select(x, MASK).sum(), lambda x: masked_sum(x, MASK), lambda x: masked_mean(x, MASK)):
        x = DIRTY.clone().requires_grad_()
        out = reduce(x)
        out.backward()
        assert out.isfinite()
        assert bool((x.grad[~MASK] == 0).all())
        assert bool((x.grad[MASK] != 0).all())


def test_masked_sum_and_mean_by_hand():
    assert masked_sum(DIRTY, MASK).item() == 9
    assert masked_mean(DIRTY, MASK).item() == 3
    assert masked_sum(DIRTY, MASK, dim=1).tolist() == [4, 5]
    assert masked_mean(DIRTY, MASK, dim=1).tolist() == [2, 5]
    assert masked_mean(DIRTY, torch.zeros_like(MASK)).item() == 0


def test_select_refuses_a_mask_of_numbers_or_another_shape():
    with pytest.raises(AssertionError, match="bool"):
        select(DIRTY, MASK.float())
    with pytest.raises(AssertionError, match="shape"):
        select(DIRTY, MASK[0])


def test_whiten_by_hand():
    """1, 3, 5: mean 3, unbiased variance (4 + 0 + 4) / 2 = 4, so -1, 0, 1; NaN elsewhere stays where it was."""
    out = whiten(DIRTY, MASK)
    torch.testing.assert_close(select(out, MASK), torch.tensor([-1.0, 0.0, 1.0]))
    assert out[0, 1].isnan()
    assert out.dtype == torch.float32


def test_whiten_leaves_fewer_than_two_values_alone():
    one = torch.tensor([True, False])
    assert whiten(torch.tensor([3.0, 8.0]), one).tolist() == [3.0, 8.0]
    assert whiten(torch.tensor([3.0, 8.0]), ~one & one).tolist() == [3.0, 8.0]


@pytest.mark.parametrize("count", range(2, 12))
def test_whiten_makes_equal_values_exact_zeros(count):
    """The mean of tenths is a tenth and some rounding, which 1 / sqrt(eps) would make ten thousand times as large."""
    tenths, everyone = torch.full((count,), 0.1, dtype=torch.float64), torch.ones(count, dtype=torch.bool)
    assert whiten(tenths, everyone).tolist() == [0.0] * count
    assert whiten_by_tokens(tenths, torch.arange(1, count + 1), everyone).tolist() == [0.0] * count


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=30).filter(lambda x: max(x) - min(x) > 1))
def test_whitened_values_have_mean_zero_and_variance_one(values):
    out = whiten(torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.bool))
    assert abs(out.mean().item()) < 1e-9
    assert out.var(unbiased=True).item() == pytest.approx(1, abs=1e-6)


def test_place_at_end_goes_by_length():
    out = place_at_end(torch.tensor([0.5, 2.0, 7.0]), torch.tensor([2, 4, 0]), width=4)
    assert out.tolist() == [[0, 0.5, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0]]


def test_place_at_end_refuses_a_response_that_does_not_fit():
    with pytest.raises(AssertionError, match="longer than 3"):
        place_at_end(torch.tensor([1.0]), torch.tensor([4]), width=3)


def test_group_statistics_by_hand():
    """Group 5 holds 1, 3 and an unscored one: mean 2, std sqrt(2). Group -1 holds 4 alone. Group 0 has none scored."""
    value = torch.tensor([1.0, 4.0, torch.nan, 3.0, torch.inf])
    stats = group_statistics(value, torch.tensor([5, -1, 5, 5, 0]), value.isfinite())
    assert stats.count.tolist() == [2, 1, 2, 2, 0]
    assert stats.mean.tolist() == [2, 4, 2, 2, 0]
    assert stats.std.tolist() == pytest.approx([math.sqrt(2), 0, math.sqrt(2), math.sqrt(2), 0])
    assert stats.has_zero_std.tolist() == [False, True, False, False, True]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-100, 100), st.booleans()), max_size=25))
def test_group_statistics_agree_with_a_loop_over_groups(rows):
    group = torch.tensor([r[0] for r in rows], dtype=torch.int64)
    value = torch.tensor([r[1] for r in rows], dtype=torch.float64)
    valid = torch.tensor([r[2] for r in rows], dtype=torch.bool)
    stats = group_statistics(value, group, valid)
    for i in range(len(rows)):
        members = value[(group == group[i]) & valid]
        assert stats.count[i] == len(members)
        assert stats.mean[i].item() == pytest.approx(members.mean().item() if len(members) else 0, abs=1e-9)
        assert stats.std[i].item() == pytest.approx(members.std().item() if len(members) > 1 else 0, abs=1e-9)
        assert stats.has_zero_std[i].item() == (len(set(members.tolist())) < 2)


def test_a_large_mean_costs_no_digits():
    """0, 1 and 2 on top of 1e9: std 1; a one-pass sum of squares would have lost it."""
    value = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    stats = group_statistics(value, torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))
    assert stats.std[0].item() == pytest.approx(1, abs=1e-9)
