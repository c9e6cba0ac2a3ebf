"""Every estimator on the menu keeps the laws of ``tests/helpers/laws.py`` with its default settings."""

import dataclasses

import pytest

from rlmodule.advantages import ADVANTAGES
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
