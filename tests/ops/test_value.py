"""Advantages from values against their definition, the value loss by hand, and what explains how much."""

import math

import pytest
import torch

from rlmodule.ops.value import explained_variance, lambda_advantages, value_loss


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def by_definition(rewards, values, next_value, gamma, lam):
    """A_t = sum_k (gamma lam)^k delta_{t+k}, each delta written out."""
    after = [*values[1:], next_value]
    delta = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0)])
def test_advantages_are_the_discounted_sum_of_surprises(gamma, lam):
    draw = torch.Generator().manual_seed(3)
    lengths = [3, 0, 1, 7, 2, 0]
    reward, value = (torch.randn(sum(lengths), generator=draw, dtype=torch.float64) for _ in range(2))
    next_value = torch.randn(len(lengths), generator=draw, dtype=torch.float64)
    out = lambda_advantages(reward, value, next_value, torch.tensor(lengths), gamma=gamma, lam=lam)
    expected, start = [], 0
    for i, n in enumerate(lengths):
        part = slice(start, start + n)
        expected += (
            by_definition(reward[part].tolist(), value[part].tolist(), float(next_value[i]), gamma, lam) if n else []
        )
        start += n
    torch.testing.assert_close(out, doubles(*expected), rtol=1e-12, atol=1e-12)


def test_without_discount_the_advantage_is_what_came_less_what_was_expected():
    """lambda = gamma = 1: 1 - 0.5 and 1 - 0.25, whatever the values in between."""
    out = lambda_advantages(doubles(0, 1), doubles(0.5, 0.25), doubles(0), torch.tensor([2]), gamma=1, lam=1)
    assert out.tolist() == [0.5, 0.75]


def test_no_token_no_advantage():
    nothing = doubles()
    assert lambda_advantages(nothing, nothing, doubles(0.0), torch.tensor([0]), gamma=1, lam=1).shape == (0,)
    assert lambda_advantages(nothing, nothing, nothing, torch.tensor([], dtype=torch.int64), gamma=1, lam=1).shape == (
        0,
    )


def test_the_value_loss_takes_the_worse_of_a_value_and_its_bounded_self():
    """Return 1, old value 0, range 0.5.

    1 would be right but is held at 0.5: (0.5 - 1)^2 / 2 = 1/8. 0.25 is inside: (0.75)^2 / 2. -2 is worse unbounded: 9/2.
    """
    value = torch.tensor([1.0, 0.25, -2.0], requires_grad=True)
    made = value_loss(value, torch.ones(3), torch.zeros(3), clip_range=0.5)
    assert made.loss.tolist() == [0.125, 0.28125, 4.5]
    assert made.metrics["vf_clip_frac"].tolist() == [1, 0, 0]
    made.loss.sum().backward()
    assert value.grad.tolist() == [0, -0.75, -3], "a value that went too far in the right direction is left alone"


def test_without_a_range_it_is_half_the_squared_error():
    made = value_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([50.0]))
    assert made.loss.tolist() == [0.5]
    assert made.metrics["vf_clip_frac"].tolist() == [0]


def test_the_gradient_of_the_value_loss_is_right():
    draw = torch.Generator().manual_seed(0)
    value, returns, old = (torch.randn(9, generator=draw, dtype=torch.float64) for _ in range(3))
    value.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, old, 0.3).loss, value)


def test_explained_variance():
    """A perfect guess explains all, a constant nothing; twice the returns leaves as much as there was."""
    returns = doubles(0, 1, 2, 5)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full_like(returns, 7), returns) == pytest.approx(0)
    assert explained_variance(2 * returns, returns) == pytest.approx(0)
    assert math.isnan(explained_variance(returns, torch.ones_like(returns)))
    assert math.isnan(explained_variance(doubles(1), doubles(1)))


@pytest.mark.parametrize("reward", [0.1, -0.3])
def test_returns_that_differ_by_rounding_explain_nothing(reward):
    """With gamma = lambda = 1 every token of every response returns the reward, but for rounding."""
    value = torch.rand(4000, generator=torch.Generator().manual_seed(0)).double()
    lengths, ends = torch.tensor([1, 2999, 1000]), torch.tensor([0, 2999, 3999])
    earned = torch.zeros_like(value).index_fill(0, ends, reward)
    after = torch.zeros(3, dtype=torch.float64)
    returns = value + lambda_advantages(earned, value, after, lengths, gamma=1.0, lam=1.0)
    assert len(set(returns.tolist())) > 1, "as equal as sums of floats can be"
    assert math.isnan(explained_variance(value, returns))
