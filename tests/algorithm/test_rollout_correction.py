"""Weights for responses of another engine, on ratios that can be worked out in the head."""

import math

import pytest
import torch

from rlmodule.algorithm.rollout_correction import RolloutCorrection, correction_weights, mismatch_metrics, mismatch_sums


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


def test_the_mismatch_by_hand():
    """Two responses: ratios 1/2 and 2, and ratio 4, truncated at 2."""
    config = RolloutCorrection(mode="truncate")
    responses = []
    for ratio in ([0.5, 2.0], [4.0]):
        sampler = torch.full((len(ratio),), -3.0, dtype=torch.float64)
        old = sampler + torch.tensor(ratio, dtype=torch.float64).log()
        responses.append((old, sampler, correction_weights(old, sampler, config)))
    metrics = mismatch_metrics(mismatch_sums(responses, config), 2)
    log2 = math.log(2)
    assert metrics["rollout_corr/kl"] == pytest.approx(-2 * log2 / 3), "log(1/2) + log 2 + log 4, with the sign turned"
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((-0.5 + log2 + 1 - log2 + 3 - 2 * log2) / 3)
    assert metrics["rollout_corr/ess"] == pytest.approx(4.5**2 / (3 * 8.25))
    assert metrics["rollout_corr/clip_frac"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/weight_mean"] == pytest.approx(1.5)
    assert metrics["rollout_corr/log_ppl_gap"] == pytest.approx((0 + 2 * log2) / 2)
    apart = sum(mismatch_sums([response], config) for response in responses)
    torch.testing.assert_close(apart, mismatch_sums(responses, config))


def test_where_the_two_agree_nothing_is_left_to_see():
    old = torch.tensor([-1.0, -2.0])
    config = RolloutCorrection(mode="observe")
    metrics = mismatch_metrics(mismatch_sums([(old, old, torch.ones(2))], config), 1)
    assert metrics.pop("rollout_corr/ess") == 1
    assert metrics.pop("rollout_corr/weight_mean") == 1
    assert set(metrics.values()) == {0}
    assert mismatch_metrics(mismatch_sums([], config), 0)["rollout_corr/kl"] == 0
