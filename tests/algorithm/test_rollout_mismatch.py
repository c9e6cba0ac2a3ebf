"""The numbers that say how far rollout engine and trainer are apart, by hand and over ranks."""

import math

import pytest
import torch

from rlmodule.algorithm.rollout_correction import RolloutCorrection, correction_weights, unbounded_weights
from rlmodule.algorithm.rollout_mismatch import ComparedResponse, mismatch_metrics, mismatch_parts
from rlmodule.algorithm.rollout_rejection import RolloutRejection, kept_tokens
from rlmodule.core.metrics import merge

LOG2 = math.log(2)
TRUNCATED, REJECTED = RolloutCorrection(mode="truncate"), RolloutRejection(token_estimator="k1", token_upper=3.0)


def response(ratio, correction=TRUNCATED, rejection=REJECTED):
    ratio = torch.tensor(ratio, dtype=torch.float64)
    rollout = torch.full_like(ratio, -3.0)
    old = rollout + ratio.log()
    weight, unbounded = correction_weights(old, rollout, correction), unbounded_weights(old, rollout, correction)
    return ComparedResponse(old, rollout, weight, unbounded, kept_tokens(old, rollout, rejection))


def test_the_mismatch_by_hand():
    """Two responses: ratios 1/2 and 2, and ratio 4, truncated at 2 and rejected."""
    metrics = mismatch_metrics(mismatch_parts([response([0.5, 2.0]), response([4.0])]))
    numbers = {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
    expected = {
        "kl": -2 * LOG2 / 3,  # log(1/2) + log 2 + log 4, with the sign turned
        "k3_kl": (-0.5 + LOG2 + 1 - LOG2 + 3 - 2 * LOG2) / 3,
        "chi2_token": (0.25 + 4 + 16) / 3 - 1,
        "chi2_seq": (1 + 16) / 2 - 1,
        "ess": 4.5**2 / (3 * 8.25),
        "clip_frac": 1 / 3,
        "weight_mean": 1.5,
        "weight_std": math.sqrt(8.25 / 3 - 1.5**2),
        "weight_min": 0.5,
        "weight_max": 2,
        "ratio_mean": 6.5 / 3,
        "ratio_std": math.sqrt(20.25 / 3 - (6.5 / 3) ** 2),
        "ratio_min": 0.5,
        "ratio_max": 4,
        "ppl_trainer": (math.exp(3) + math.exp(3) / 4) / 2,
        "ppl_rollout": math.exp(3),
        "log_ppl_diff": -2 * LOG2 / 2,
        "log_ppl_gap": 2 * LOG2 / 2,
        "rejected_tokens": 1 / 3,
        "rejected_responses": 1 / 2,
    }
    assert numbers == pytest.approx(expected)


def test_ranks_merge_to_the_same_numbers():
    """However responses are spread over ranks, also over one that has none; the names are the same on all."""
    responses = [response([0.5, 2.0]), response([4.0, 1.0, 0.9]), response([])]
    whole = mismatch_parts(responses)
    for cut in ([[0], [1, 2]], [[], [2, 1], [0]]):
        parts = [mismatch_parts([responses[i] for i in rank]) for rank in cut]
        assert all(part.keys() == whole.keys() for part in parts)
        assert mismatch_metrics(merge(parts)) == pytest.approx(mismatch_metrics(whole), rel=1e-12)


def test_where_the_two_agree_nothing_is_left_to_see():
    same = response([1.0, 1.0], RolloutCorrection(mode="observe"), RolloutRejection())
    metrics = mismatch_metrics(mismatch_parts([same]))
    ones = ("ess", *(f"{of}_{what}" for of in ("weight", "ratio") for what in ("mean", "min", "max")))
    assert {metrics.pop(f"rollout_corr/{name}") for name in ones} == {1}
    assert metrics.pop("rollout_corr/ppl_trainer") == metrics.pop("rollout_corr/ppl_rollout")
    assert set(metrics.values()) == {0}
    assert mismatch_metrics(mismatch_parts([])) == {}


def test_a_wild_ratio_stays_finite():
    far = response([1e30, 1e-30], RolloutCorrection(mode="mask"))
    assert all(math.isfinite(value) for value in mismatch_metrics(mismatch_parts([far])).values())
