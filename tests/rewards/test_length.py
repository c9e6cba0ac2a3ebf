"""Lengths and penalties: DAPO's soft overlong punishment, arXiv:2503.14476, equation 13."""

from dataclasses import replace

import pytest
import torch

from rlmodule.core.errors import ConfigError
from rlmodule.rewards.length import Length
from tests.rewards.samples import sample


@pytest.mark.parametrize(
    ("tokens", "score"),
    [(1, 0.0), (16_384, 0.0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1.0), (30_000, -1.0)],
)
def test_the_penalty_of_dapo(tokens, score):
    """Of 20,480 tokens the last 4,096 are the buffer: ((L_max - L_cache) - |y|) / L_cache."""
    [result] = Length(start=16_384, limit=20_480)([sample("x", tokens=tokens)])
    assert result.value == score


def test_what_an_environment_showed_is_not_counted():
    """modelscope/ms-swift#10149: seven tokens drawn in two turns, of a limit of 8 with a buffer of 2."""
    mask = torch.tensor([True] * 3 + [False] * 90 + [True] * 4)
    [result] = Length(start=6, limit=8)([replace(sample("x", tokens=97), loss_mask=mask)])
    assert result.value == -0.5


def test_short_ones_and_a_bonus():
    assert Length(start=10, limit=20, shortest=3).score(2) == -1.0
    assert Length(start=10, limit=20, shortest=3).score(3) == 0.0
    assert Length(start=10, limit=20, penalty=0.5).score(15) == 0.25


def test_a_response_that_was_cut_is_as_long_as_can_be():
    [result] = Length(start=10, limit=20)([sample("x", tokens=5, finish_reason="length")])
    assert result.value == -1.0


@pytest.mark.parametrize(
    "keys", [{"start": 5, "limit": 5}, {"start": -1, "limit": 5}, {"start": 1, "limit": 5, "shortest": 2}]
)
def test_lengths_must_grow(keys):
    with pytest.raises(ConfigError):
        Length(**keys)
