"""Shared bug cases of the metrics: numbers and tolerances copied from the case list, id in each test's name."""

import pytest
import torch

from rlmodule.core.metrics import Metric, ReduceType, from_rows, merge, ratio, to_rows

TOLERANCE = 1e-5


def over_ranks(ranks):
    """Each rank merges its micro-batches, then its rows travel and all ranks merge."""
    return merge(from_rows(*to_rows(merge(parts))) for parts in ranks)


def test_met_02_a_ratio_is_the_sum_of_numerators_over_the_sum_of_denominators():
    """MET-02."""
    ranks = [[[4.0, 2], [6.0, 4]], [[1.0, 1], [9.0, 3]]]
    merged = over_ranks([[{"loss": ratio(*part)} for part in parts] for parts in ranks])["loss"]
    assert merged.result == pytest.approx(2.0, abs=TOLERANCE)
    assert merged.value == pytest.approx(20.0, abs=TOLERANCE)
    assert merged.weight == 10


@pytest.mark.parametrize("count", [int, float, torch.tensor])
def test_met_03_integer_counters_are_not_floored(count):
    """MET-03."""
    values, sizes = [1.0, 1.0], [3, 4]
    ranks = [[{"accuracy": ratio(v * n, count(n))}] for v, n in zip(values, sizes, strict=True)]
    assert over_ranks(ranks)["accuracy"].result == pytest.approx(1.0, abs=TOLERANCE)


def test_met_05_extrema_ignore_empty_ranks():
    """MET-05."""
    ranks = [
        {"max": 1.5, "min": 0.5, "tokens": 4},
        {"max": 2.5, "min": 0.75, "tokens": 2},
        {"max": 0.0, "min": 0.0, "tokens": 0},
    ]
    merged = over_ranks(
        [
            [
                {
                    "ratio_max": Metric(rank["max"], rank["tokens"], ReduceType.MAX),
                    "ratio_min": Metric(rank["min"], torch.tensor(rank["tokens"]), ReduceType.MIN),
                }
            ]
            for rank in ranks
        ]
    )
    assert merged["ratio_max"].result == pytest.approx(2.5, abs=TOLERANCE)
    assert merged["ratio_min"].result == pytest.approx(0.5, abs=TOLERANCE)
