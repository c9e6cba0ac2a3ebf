"""Ratios and KL estimates: values from their formulas, gradients as the table in ``ops/kl.py`` says."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.ops.kl import KINDS, MAX_LOG_RATIO, binary_kl, bounded_exp, importance_ratio, kl_per_token

VALUES = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.expm1(-d) + d,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d),
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
}


@pytest.mark.parametrize("kind", KINDS)
@given(difference=st.floats(-15, 15).filter(lambda d: abs(d) > 1e-3))
def test_values_and_slopes_are_those_of_the_table(kind, difference):
    base = kind.removesuffix("+")
    logprob = torch.tensor([difference - 1.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_per_token(logprob, torch.tensor([-1.0], dtype=torch.float64), kind)
    estimate.sum().backward()
    d = logprob.item() + 1.0
    assert estimate.item() == pytest.approx(VALUES[base](d), rel=1e-9, abs=1e-9)
    assert logprob.grad.item() == pytest.approx(SLOPES["k2" if kind != base else base](d), rel=1e-9, abs=1e-9)


def test_the_kinds_are_four_estimates_and_three_with_the_slope_of_k2():
    assert set(KINDS) == {"k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"}


def test_k3_keeps_its_digits_near_zero():
    """At d = 1e-4 it is d^2/2 = 5e-9, less than one float32 step of exp(-d)."""
    out = kl_per_token(torch.tensor([-1e-4]), torch.tensor([0.0]), "k3")
    assert out.item() == pytest.approx(5e-9, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("difference", [-80.0, -30.0, 30.0, 80.0])
def test_a_policy_that_ran_away_is_still_pulled_back(kind, difference):
    """Values stay finite in float32, and the slope is nowhere cut off."""
    logprob = torch.tensor([difference - 90.0], requires_grad=True)
    estimate = kl_per_token(logprob, torch.tensor([-90.0]), kind)
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert logprob.grad.isfinite().all()
    assert logprob.grad.item() != 0
    if kind != "k1":
        assert math.copysign(1, logprob.grad.item()) == math.copysign(1, difference)


def test_bounded_exp_is_exp_below_the_bound_and_keeps_its_slope_above():
    x = torch.tensor([-200.0, 0.0, 1.0, MAX_LOG_RATIO, 500.0], dtype=torch.float64, requires_grad=True)
    out = bounded_exp(x)
    out.sum().backward()
    top = math.exp(MAX_LOG_RATIO)
    expected = torch.tensor([math.exp(-200), 1, math.e, top, top], dtype=torch.float64)
    torch.testing.assert_close(out.detach(), expected)
    torch.testing.assert_close(x.grad, expected)


def test_the_first_ratio_is_exactly_one():
    logprob = torch.randn(100, requires_grad=True)
    assert bool((importance_ratio(logprob, logprob.detach()) == 1).all())


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_per_token(torch.zeros(1), torch.zeros(1), "k4")


def test_binary_kl_by_hand():
    """From 1/2 to 3/4: 1/2 ln(2/3) + 1/2 ln 2 = 1/2 ln(4/3); from a policy to itself 0, also at probability 1."""
    log = torch.tensor([0.5, 0.3, 1.0], dtype=torch.float64).log()
    other = torch.tensor([0.75, 0.3, 1.0], dtype=torch.float64).log()
    assert binary_kl(log, other).tolist() == pytest.approx([0.5 * math.log(4 / 3), 0, 0])


def test_binary_kl_stays_finite_at_the_edges():
    log = torch.tensor([0.0, -1e-7, -100.0, -0.5])
    other = torch.tensor([-100.0, 0.0, 0.0, 0.0])
    out = binary_kl(log, other)
    assert bool(out.isfinite().all())
    assert bool((out >= 0).all())
