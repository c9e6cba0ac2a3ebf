"""The optimal token baseline in a run: the policy says energies in one pass, and the number of ranks changes nothing."""

from functools import partial

import pytest

from rlmodule.records.metrics_log import read_records
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import MADE_OF_THE_LAYOUT, MADE_OF_TIME, numbers, run_small, small_run

WORDS = ("algorithm=optimal_token_baseline", "trainer.max_epochs=2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone")
    return run_small(run_dir, *WORDS)


def test_advantages_differ_within_a_response_and_one_pass_is_made(alone):
    iterations = [r.metrics for r in alone if r.kind == "iteration"]
    assert any(m["advantage/max"] > m["advantage/min"] for m in iterations)
    assert all("timing_s/old_logprob" in m for m in iterations)
    steps = [r.metrics for r in alone if r.kind == "step"]
    assert all(m["train/skipped_steps"] == 0 for m in steps)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_change_nothing(alone, tmp_path, strategy):
    run_on_ranks(2, partial(_fit, tmp_path / strategy, strategy))
    without = (*MADE_OF_TIME, *MADE_OF_THE_LAYOUT)
    got = numbers(read_records(tmp_path / strategy / "metrics.jsonl"), without=without)
    for here, there in zip(got, numbers(alone, without=without), strict=True):
        assert here[:2] == there[:2]
        assert here[2] == pytest.approx(there[2], rel=1e-3, abs=1e-5, nan_ok=True)


def test_a_budget_of_tokens_changes_nothing(alone, tmp_path):
    cut = run_small(tmp_path / "cut", *WORDS, "batching.max_token_len_per_gpu=100")
    without = (*MADE_OF_TIME, *MADE_OF_THE_LAYOUT)
    for here, there in zip(numbers(cut, without=without), numbers(alone, without=without), strict=True):
        assert here[2] == pytest.approx(there[2], rel=1e-3, abs=1e-5, nan_ok=True)


def test_weights_of_the_rollout_correction_reach_the_baseline(tmp_path):
    """With bounds that leave every weight at 1 the two baselines are one; with others they are not."""
    words = (*WORDS, "rollout_correction=tis", "rollout.temperature=0.7")
    bounds = {"even": ("1.0", "1.0000001"), "free": ("0.0", "10.0")}
    results = {}
    for name, (lower, upper) in bounds.items():
        limits = (f"algorithm.rollout_correction.lower={lower}", f"algorithm.rollout_correction.upper={upper}")
        for advantage in ("optimal_token_baseline", "weighted_optimal_token_baseline"):
            records = run_small(
                tmp_path / name / advantage, *words, *limits, f"advantage={advantage}", "rollout.staleness=1"
            )
            results[name, advantage] = [r.metrics["advantage/max"] for r in records if r.kind == "iteration"]
    assert results["even", "optimal_token_baseline"] == pytest.approx(
        results["even", "weighted_optimal_token_baseline"], rel=1e-5
    )
    assert results["free", "optimal_token_baseline"] != pytest.approx(
        results["free", "weighted_optimal_token_baseline"], rel=1e-9
    )


def _fit(run_dir, strategy, rank):
    run = small_run(run_dir, *WORDS, "trainer.devices=2", f"strategy={strategy}")
    run.fit()
