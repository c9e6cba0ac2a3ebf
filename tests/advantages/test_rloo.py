"""RLOO is the reward minus the mean of the OTHERS; its laws are in test_advantage_laws.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.advantages.rloo import RLOO
from tests.helpers.laws import scored


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8).filter(lambda r: len(set(r)) > 1))
def test_the_baseline_leaves_the_response_itself_out(rewards):
    expected = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    assert RLOO()(scored(rewards, [5] * len(rewards))).tolist() == pytest.approx(expected, abs=1e-9)


def test_unscored_members_do_not_count_as_others():
    """1 against 0, with a third that has no score: 1 - 0 and 0 - 1."""
    assert RLOO()(scored([1.0, float("nan"), 0.0], [0, 0, 0])).tolist() == [1, 0, -1]
