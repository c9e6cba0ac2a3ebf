"""Every loss on the menu keeps the laws of ``tests/helpers/laws.py`` with its default settings."""

import dataclasses

import pytest

from rlmodule.losses import LOSSES
from tests.helpers import laws

NAMES = LOSSES.names()


@pytest.fixture(params=NAMES)
def loss(request):
    return LOSSES.get(request.param)()


def test_a_loss_is_a_frozen_dataclass_with_defaults(loss):
    assert dataclasses.is_dataclass(loss)
    assert type(loss).__dataclass_params__.frozen
    assert loss == type(loss)()


def test_a_loss_does_not_depend_on_the_cut(loss):
    laws.check_loss_does_not_depend_on_the_cut(loss)


def test_a_loss_ignores_what_is_masked(loss):
    laws.check_loss_ignores_what_is_masked(loss)


@pytest.mark.parametrize("name", [name for name in NAMES if "advantage" in LOSSES.get(name).needs])
def test_a_loss_has_no_gradient_without_advantage(name):
    loss = LOSSES.get(name)()
    laws.check_no_gradient_without_advantage(loss, drift=0.5 if loss.zero_at_zero_advantage else 0.0)


def test_what_a_loss_promises_of_zero_advantages_it_can_keep(loss):
    """Samples are left out on its word; the law above shows that the gradient is 0."""
    assert not loss.zero_at_zero_advantage or "advantage" in loss.needs


def test_a_loss_reads_only_what_it_names(loss):
    laws.check_loss_reads_only_what_it_names(loss)


def test_a_loss_describes_tokens(loss):
    laws.check_loss_describes_tokens(loss)


def test_a_loss_is_finite_after_a_wild_drift(loss):
    laws.check_loss_is_finite_after_a_wild_drift(loss)
