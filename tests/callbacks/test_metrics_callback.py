from __future__ import annotations

from rlmodule.callbacks.metrics import distributions
from tests.callbacks.builders import info, iteration_of


def test_histograms_hold_every_scored_response():
    iteration = iteration_of([info(0, 1.0), info(1, None), info(2, 0.0, response_len=5)], [1.0, 0.0, -1.0])
    assert distributions(iteration) == {
        "distribution/reward": [1.0, 0.0],
        "distribution/response_length": [2.0, 2.0, 5.0],
        "distribution/advantage": [1.0, -1.0],
    }


def test_nothing_scored_draws_no_histogram_of_rewards():
    assert distributions(iteration_of([info(0, None)], [0.0])) == {"distribution/response_length": [2.0]}
