"""GRPO by hand; its shared cases are in tests/cases, its laws in test_advantage_laws.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.advantages.grpo import GRPO
from rlmodule.core.config import convert
from rlmodule.core.errors import ConfigError
from tests.helpers.laws import scored


def test_each_group_by_hand():
    """Group 3: 0 and 2, mean 1, std sqrt(2). Group 8: 1, 2, 3, mean 2, std 1."""
    out = GRPO(eps=0.0)(scored([0, 1, 2, 2, 3], [3, 8, 3, 8, 8]))
    half = 1 / math.sqrt(2)
    assert out.tolist() == pytest.approx([-half, -1, half, 0, 1])


def test_without_the_std_it_is_the_distance_from_the_mean():
    assert GRPO(normalize_by_std=False)(scored([0, 4, 1, 1], [0, 0, 1, 1])).tolist() == [-2, 2, 0, 0]


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8).filter(lambda r: len(set(r)) > 1), st.integers(-9, 9))
def test_groups_do_not_touch_and_a_shift_does_not_matter(rewards, shift):
    alone = GRPO()(scored(rewards, [0] * len(rewards)))
    together = GRPO()(scored([*rewards, 100.0, -100.0], [0] * len(rewards) + [1, 1]))
    shifted = GRPO()(scored([r + shift for r in rewards], [0] * len(rewards)))
    torch.testing.assert_close(together[:-2], alone)
    torch.testing.assert_close(shifted, alone)
    assert abs(alone.sum().item()) < 1e-9


def test_rewards_of_float32_are_worked_on_in_float64():
    x = scored([0.0, 1.0, 1.0], [0, 0, 0])
    x = type(x)(x.reward.float(), x.group, x.loss_tokens)
    assert GRPO()(x).dtype == torch.float64


def test_a_negative_eps_is_refused_with_its_key():
    with pytest.raises(ConfigError, match=r"advantage\.eps=-1"):
        convert(GRPO, {"eps": -1}, "advantage")
