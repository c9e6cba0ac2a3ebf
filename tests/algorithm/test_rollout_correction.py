"""Weights for responses of another engine, on ratios that can be worked out in the head."""

import pytest
import torch

from rlmodule.algorithm.rollout_correction import RolloutCorrection, correction_weights
from rlmodule.core.errors import ConfigError


def weights(ratio, **config):
    """Weights of one response whose tokens the trainer finds this many times likelier than the sampler did."""
    ratio = torch.tensor(ratio, dtype=torch.float64)
    sampler = torch.full_like(ratio, -3.0)
    return correction_weights(sampler + ratio.log(), sampler, RolloutCorrection(**config)).tolist()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"mode": "truncate"}, [0.5, 2, 2]),
        ({"mode": "truncate", "lower": 0.75}, [0.75, 2, 2]),
        ({"mode": "mask"}, [0.5, 2, 0]),
        ({"mode": "mask", "lower": 0.75}, [0, 2, 0]),
        ({"mode": "mask", "upper": 10.0}, [0.5, 2, 8]),
        ({"mode": "truncate", "level": "sequence"}, [2, 2, 2]),  # the product 8, bounded
        ({"mode": "truncate", "level": "sequence", "upper": 9.0}, [8, 8, 8]),
        ({"mode": "mask", "level": "sequence"}, [0, 0, 0]),
        ({"mode": "truncate", "level": "geometric"}, [2, 2, 2]),  # the cube root of 8
        ({"mode": "mask", "level": "geometric", "upper": 1.9}, [0, 0, 0]),
        ({"mode": "truncate", "veto": 0.6}, [0, 0, 0]),
        ({"mode": "truncate", "veto": 0.4}, [0.5, 2, 2]),
        ({"mode": "observe", "veto": 0.6}, [1, 1, 1]),
        ({"mode": "none"}, [1, 1, 1]),
    ],
)
def test_weights_by_hand(config, expected):
    assert weights([0.5, 2.0, 8.0], **config) == pytest.approx(expected)


def test_no_token_no_trouble():
    for level in ("token", "sequence", "geometric"):
        assert weights([], mode="truncate", level=level, veto=0.1) == []


def test_a_wild_ratio_stays_finite():
    old, sampler = torch.tensor([0.0]), torch.tensor([-1e4])
    assert correction_weights(old, sampler, RolloutCorrection(mode="mask")).tolist() == [0]
    assert correction_weights(old, sampler, RolloutCorrection(mode="truncate")).tolist() == [2]


@pytest.mark.parametrize(("name", "value"), [("lower", 1.5), ("upper", 0.9), ("veto", 1.0), ("upper", 0.0)])
def test_bounds_under_which_no_token_on_policy_would_be_left_are_refused(name, value):
    with pytest.raises(ConfigError) as caught:
        RolloutCorrection(mode="mask", **{name: value})
    assert caught.value.key == f"rollout_correction.{name}"


def test_a_weight_of_one_may_be_the_bound():
    assert weights([1.0, 1.0], mode="mask", lower=1.0) == weights([1.0, 1.0], mode="mask", upper=1.0) == [1, 1]
