"""Every estimator on the menu keeps the laws of ``tests/helpers/laws.py`` with its default settings."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.advantages import ADVANTAGES
from rlmodule.algorithm.shaping import has_reward_variance
from rlmodule.ops.masked import whiten, whiten_by_tokens
from tests.helpers import laws

NAMES = ADVANTAGES.names()


@pytest.fixture(params=NAMES)
def advantage(request):
    return ADVANTAGES.get(request.param)()


def test_the_menu_is_the_folder():
    assert {"grpo", "rloo"} <= set(NAMES)


def test_an_estimator_is_a_frozen_dataclass_with_defaults(advantage):
    assert dataclasses.is_dataclass(advantage)
    assert type(advantage).__dataclass_params__.frozen
    assert advantage == type(advantage)()


def test_an_advantage_follows_its_response(advantage):
    laws.check_advantage_follows_its_response(advantage)


def test_an_advantage_reads_only_what_it_names(advantage):
    laws.check_advantage_reads_only_what_it_names(advantage)


def test_unscored_responses_change_nothing(advantage):
    laws.check_unscored_responses_change_nothing(advantage)


def test_an_advantage_is_float64_per_response(advantage):
    laws.check_advantage_is_float64_per_response(advantage)


@pytest.mark.parametrize("name", [name for name in NAMES if "group" in ADVANTAGES.get(name).needs])
def test_flat_and_lonely_groups_give_zero(name):
    laws.check_flat_and_lonely_groups_give_zero(ADVANTAGES.get(name)())


def without_eps(name):
    """An estimator with the least eps that it takes: nothing hides what it makes of a spread."""
    made = ADVANTAGES.get(name)()
    takes_zero = hasattr(made, "eps") and name not in ("optimal_token_baseline", "weighted_optimal_token_baseline")
    return dataclasses.replace(made, eps=0.0) if takes_zero else made


def off_by_units(value, units):
    """``value``, so many floating-point numbers further up."""
    for _ in range(units):
        value = math.nextafter(value, math.inf)
    return value


VALUES = st.floats(1e-6, 1e6) | st.floats(-1e6, -1e-6)
UNITS = st.lists(st.integers(0, 4), min_size=2, max_size=8)


@pytest.mark.parametrize("name", [name for name in NAMES if "group" in ADVANTAGES.get(name).needs])
@settings(max_examples=25, deadline=None)
@given(value=VALUES, units=UNITS)
def test_rewards_equal_but_for_rounding_are_a_flat_group(name, value, units):
    """Their spread is no spread: the group gets exactly 0, whatever the others of the iteration get."""
    flat = [off_by_units(value, n) for n in units]
    x = laws.scored([*flat, 1.0, 0.0], [0] * len(flat) + [1, 1])
    out = laws.by_response(without_eps(name), x)
    assert all(bool((part == 0).all()) for part in out[:-2])
    assert any(bool((part != 0).any()) for part in out[-2:])
    assert has_reward_variance(x.reward, x.group).tolist() == [False] * len(flat) + [True, True]


@settings(max_examples=25, deadline=None)
@given(value=VALUES, units=UNITS)
def test_an_iteration_equal_but_for_rounding_is_whitened_to_zero(value, units):
    flat = torch.tensor([off_by_units(value, n) for n in units], dtype=torch.float64)
    mask = torch.ones(len(flat), dtype=torch.bool)
    assert whiten(flat, mask).tolist() == whiten_by_tokens(flat, mask.long(), mask).tolist() == [0.0] * len(flat)
    out = laws.by_response(ADVANTAGES.get("reinforce_pp")(), laws.scored(flat.tolist(), range(len(flat))))
    assert all(bool((part == 0).all()) for part in out)


@settings(max_examples=25, deadline=None)
@given(value=VALUES, spread=st.floats(1e-10, 1.0))
def test_a_spread_beyond_rounding_counts_in_full(value, spread):
    """The scale of rewards does not matter to the estimators that divide by it: half the square root of 2 each."""
    x = laws.scored([value, value + abs(value) * spread], [0, 0])
    for name in ("grpo", "gdpo"):
        assert without_eps(name)(x).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-4), name
    assert without_eps("grpo_passk")(x).tolist() == pytest.approx([0, math.sqrt(2)], rel=1e-4)


def test_components_that_cancel_but_for_rounding_give_zero():
    """What 0.1 and 0.3 are to their mean is not, to the last digit, what 0.7 and 0.9 are to theirs."""
    x = laws.scored([1.0, 1.0], [0, 0])
    parts = {"up": torch.tensor([0.1, 0.3], dtype=torch.float64), "down": torch.tensor([0.9, 0.7], dtype=torch.float64)}
    assert without_eps("gdpo")(dataclasses.replace(x, parts=parts)).tolist() == [0, 0]
