"""Which tokens and responses of another engine leave the update, on ratios that can be worked out in the head."""

import math

import pytest
import torch

from rlmodule.algorithm.rollout_rejection import RolloutRejection, kept_tokens
from rlmodule.core.errors import ConfigError

LOG2 = math.log(2)


def kept(ratio, **config):
    """Which tokens of one response stay, which the trainer finds this many times likelier than the rollout engine."""
    ratio = torch.tensor(ratio, dtype=torch.float64)
    rollout = torch.full_like(ratio, -3.0)
    return kept_tokens(rollout + ratio.log(), rollout, RolloutRejection(**config)).tolist()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [1, 1, 1]),
        ({"token_estimator": "k1", "token_upper": 2.1}, [1, 1, 0]),
        ({"token_estimator": "k1", "token_lower": 0.6, "token_upper": 2.1}, [0, 1, 0]),
        ({"token_estimator": "k2", "token_upper": 0.5 * LOG2**2 + 1e-9}, [1, 1, 0]),
        ({"token_estimator": "k2", "token_upper": 0.5 * LOG2**2 - 1e-9}, [0, 0, 0]),  # the same number for 1/2 and 2
        ({"token_estimator": "k3", "token_upper": 0.25}, [1, 0, 0]),  # 1/2 - 1 + log 2 = 0.19, 1 - log 2 = 0.31
        ({"token_estimator": "k3", "token_upper": 0.35}, [1, 1, 0]),
        ({"sequence_estimator": "k1", "sequence_reduce": "sum", "sequence_upper": 7.9}, [0, 0, 0]),  # the product is 8
        ({"sequence_estimator": "k1", "sequence_reduce": "sum", "sequence_upper": 8.1}, [1, 1, 1]),
        ({"sequence_estimator": "k1", "sequence_upper": 1.9}, [0, 0, 0]),  # the geometric mean is 2
        ({"sequence_estimator": "k1", "sequence_upper": 2.1}, [1, 1, 1]),
        ({"sequence_estimator": "k1", "sequence_reduce": "max", "sequence_upper": 8.1}, [1, 1, 1]),
        (
            {"sequence_estimator": "k1", "sequence_reduce": "max", "sequence_upper": 8.1, "sequence_lower": 0.6},
            [0, 0, 0],
        ),
        ({"sequence_estimator": "k2", "sequence_reduce": "sum", "sequence_upper": 5.5 * LOG2**2 + 1e-9}, [1, 1, 1]),
        ({"sequence_estimator": "k2", "sequence_reduce": "sum", "sequence_upper": 5.5 * LOG2**2 - 1e-9}, [0, 0, 0]),
        ({"sequence_estimator": "k2", "sequence_reduce": "max", "sequence_upper": 4.5 * LOG2**2 + 1e-9}, [1, 1, 1]),
        ({"sequence_estimator": "k3", "sequence_upper": (7.5 - 3 * LOG2) / 3 + 1e-9}, [1, 1, 1]),
        ({"sequence_estimator": "k3", "sequence_upper": (7.5 - 3 * LOG2) / 3 - 1e-9}, [0, 0, 0]),
        (
            {"token_estimator": "k1", "token_upper": 2.1, "sequence_estimator": "k1", "sequence_upper": 2.1},
            [1, 1, 0],
        ),  # judged by all tokens, also rejected
    ],
)
def test_rejections_by_hand(config, expected):
    assert kept([0.5, 2.0, 8.0], **config) == [bool(one) for one in expected]


def test_where_the_two_agree_everything_stays():
    for estimator in ("k1", "k2", "k3"):
        for reduce in ("sum", "mean", "max"):
            assert all(
                kept([1.0, 1.0], token_estimator=estimator, sequence_estimator=estimator, sequence_reduce=reduce)
            )
            assert kept([], token_estimator=estimator, sequence_estimator=estimator, sequence_reduce=reduce) == []


def test_a_wild_or_missing_number_is_rejected():
    old, rollout = torch.tensor([0.0, -1.0, -1.0, -1e4]), torch.tensor([-1e4, math.nan, -1.0, -1.0])
    for estimator in ("k1", "k2", "k3"):
        config = RolloutRejection(token_estimator=estimator, token_lower=0.5 if estimator == "k1" else 0.0)
        assert kept_tokens(old, rollout, config).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"token_estimator": "k4"}, "rollout_rejection.token_estimator"),
        ({"sequence_reduce": "median"}, "rollout_rejection.sequence_reduce"),
        ({"token_upper": 0.0}, "rollout_rejection.token_upper"),
        ({"sequence_lower": -1.0}, "rollout_rejection.sequence_lower"),
        ({"sequence_estimator": "k1", "sequence_upper": 0.01}, "rollout_rejection.sequence_upper"),  # a bound for k3
        ({"token_estimator": "k1", "token_lower": 1.5}, "rollout_rejection.token_lower"),
    ],
)
def test_bounds_that_cannot_work_are_refused(config, key):
    with pytest.raises(ConfigError) as caught:
        RolloutRejection(**config)
    assert caught.value.key == key
