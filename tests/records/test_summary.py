from __future__ import annotations

import math

import pytest

from rlmodule.experience.iteration_metrics import (
    RunTotals,
    iteration_metrics,
    length_metrics,
    reward_metrics,
)
from rlmodule.records.metrics_log import Elapsed, Record
from rlmodule.records.summary import Change, changes, held_out, run_totals, running_mean, series
from tests.callbacks.builders import info, iteration_of

LAPS = {"collect": Elapsed(1.5, 1.0), "validate": Elapsed(9.0, 9.0), "update": Elapsed(0.5, 0.25)}


def test_reward_statistics_are_those_of_the_scored_responses():
    sample_info = [
        info(0, 1.0),
        info(1, None),
        info(2, 0.0, group=1),
        info(3, math.nan, group=1),
        info(4, 0.5, group=1),
    ]
    metrics = reward_metrics(sample_info)
    # scored: 1, 0, 0.5; mean 0.5, squared distances 0.25 + 0.25 + 0 over 3
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.5 / 3))
    assert (metrics["reward/min"], metrics["reward/max"], metrics["reward/unscored"]) == (0.0, 1.0, 2.0)


def test_flat_groups_is_the_share_of_groups_whose_scored_rewards_are_all_equal():
    flat = [info(0, 1.0), info(1, 1.0), info(2, None)]
    mixed = [info(3, 0.0, group=1), info(4, 1.0, group=1)]
    unscored = [info(5, None, group=2)]
    assert reward_metrics([*flat, *mixed, *unscored])["reward/zero_std_groups"] == 0.5


def test_a_component_is_averaged_over_the_responses_that_have_it():
    """T2B-41."""
    sample_info = [info(0, 1.0, format=1.0), info(1, 0.0, format=0.0, brevity=0.2), info(2, None, format=9.0)]
    metrics = reward_metrics(sample_info)
    assert (metrics["reward/format"], metrics["reward/brevity"]) == (0.5, 0.2)


def test_a_component_never_takes_the_name_of_a_statistic():
    metrics = reward_metrics([info(0, 1.0, mean=5.0)])
    assert (metrics["reward/mean"], metrics["reward/mean_part"]) == (1.0, 5.0)


def test_nothing_scored_gives_nan_and_a_count():
    metrics = reward_metrics([info(0, None), info(1, math.inf)])
    assert metrics["reward/unscored"] == 2.0
    assert all(math.isnan(metrics[f"reward/{name}"]) for name in ("mean", "std", "min", "max", "zero_std_groups"))


def test_clip_ratio_is_the_share_of_cut_responses():
    cut = info(0, 1.0, response_len=4, truncated=True)
    metrics = length_metrics([cut, info(1, 1.0, response_len=2), info(2, 1.0, response_len=3, prompt_len=10)])
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert [metrics[f"response_length/{name}"] for name in ("mean", "max", "min")] == [3.0, 4.0, 2.0]
    assert [metrics[f"prompt_length/{name}"] for name in ("mean", "max", "min")] == [6.0, 10.0, 4.0]


def test_padding_counts_nowhere():
    sample_info = [info(0, 1.0), info(1, 0.0)]
    alone = iteration_metrics(iteration_of(sample_info, [1.0, -1.0]), {}, LAPS, RunTotals().after(1, sample_info))
    sample_info.append(info(-1, 0.5, group=-1, prompt_len=1, response_len=1, is_padding=True))
    padded = iteration_metrics(iteration_of(sample_info, [1.0, -1.0, 7.0]), {}, LAPS, RunTotals().after(1, sample_info))
    assert padded == alone


def test_advantages_of_unscored_responses_are_left_out():
    iteration = iteration_of([info(0, 1.0), info(1, None), info(2, 0.0)], [0.7, 0.0, 0.5])
    metrics = iteration_metrics(iteration, {}, LAPS, RunTotals())
    assert [metrics[f"advantage/{name}"] for name in ("mean", "min", "max")] == [pytest.approx(0.6), 0.5, 0.7]


def test_no_advantage_is_logged_where_the_loss_needs_none():
    metrics = iteration_metrics(iteration_of([info(0, 1.0)]), {}, LAPS, RunTotals())
    assert not any(name.startswith("advantage/") for name in metrics)


def test_throughput_is_over_the_wall_clock_of_the_iteration_without_validation():
    sample_info = [info(0, 1.0, prompt_len=6, response_len=4), info(1, 1.0, prompt_len=8, response_len=2)]
    metrics = iteration_metrics(iteration_of(sample_info), {"rollout": 1.0, "reward": 0.25}, LAPS, RunTotals())
    assert metrics["timing_s/iteration"] == 2.0  # collect 1.5 + update 0.5
    assert metrics["perf/tokens_per_s"] == 10.0  # 20 tokens
    assert (metrics["timing_s/rollout"], metrics["timing_s/reward"], metrics["timing_s/update"]) == (1.0, 0.25, 0.5)
    assert (metrics["cpu_s/collect"], metrics["cpu_s/update"]) == (1.0, 0.25)


def test_progress_counts_samples_and_tokens_of_every_iteration():
    sample_info = [info(0, 1.0), info(1, 1.0)]  # 6 tokens each
    totals_so_far = RunTotals().after(1, sample_info).after(2, sample_info)
    metrics = iteration_metrics(iteration_of(sample_info), {}, LAPS, totals_so_far)
    assert [metrics[f"progress/{name}"] for name in ("iteration", "samples", "tokens")] == [2.0, 4.0, 24.0]


def history() -> list[Record]:
    validation = {"timing_s/validation": 0.5, "cpu_s/validation": 0.25}
    first = {"timing_s/iteration": 3.0, "timing_s/rollout": 1.0, "cpu_s/collect": 1.0}
    second = {"timing_s/iteration": 2.0, "timing_s/rollout": 0.5, "cpu_s/collect": 0.5}
    progress = {"progress/iteration": 2.0, "progress/samples": 8.0, "progress/tokens": 48.0}
    return [
        Record("validation", 0, 0, {"val/accuracy": 0.25, "val/reward/mean": 0.25, **validation}),
        Record("step", 1, 1, {"actor/entropy": 2.0}),
        Record("iteration", 1, 1, {"reward/mean": math.nan, **first}),
        Record("step", 2, 2, {"actor/entropy": 1.0}),
        Record("iteration", 2, 2, {"reward/mean": 0.5, **second, **progress}),
        Record("validation", 2, 2, {"val/accuracy": 0.75, "val/reward/mean": 0.75, **validation}),
    ]


def test_a_curve_leaves_out_what_is_not_finite():
    assert series(history(), "reward/mean") == ([2], [0.5])


def test_a_running_mean_looks_back_only():
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_the_table_shows_first_and_last_and_leaves_out_what_was_never_seen():
    assert changes(history()) == [
        Change("held-out accuracy", "0.250", "0.750", best="0.750"),
        Change("mean reward", "0.500", "0.500"),
        Change("entropy, nats per token", "2.000", "1.000"),
        Change("seconds per iteration", "3.00", "2.00"),
    ]


def test_the_table_of_an_imitation_begins_with_its_loss():
    records = [Record("step", 1, 1, {"actor/loss": 4.5}), Record("step", 2, 1, {"actor/loss": 1.25})]
    assert changes(records) == [Change("loss", "4.5000", "1.2500")]


def test_a_mean_reward_is_called_reward_unless_every_validation_was_an_accuracy():
    """A reward that is no accuracy may be 0 for every answer at the start."""
    records = [
        Record("validation", 0, 0, {"val/reward/mean": 0.0, "val/accuracy": 0.0}),
        Record("validation", 2, 1, {"val/reward/mean": 0.75}),
        Record("validation", 4, 2, {"val/reward/mean": 0.5}),
    ]
    assert changes(records) == [Change("held-out reward", "0.000", "0.500", best="0.750")]


def validations(*values, metric="val/reward/mean", spread=0.05):
    """One per iteration, with an interval around each value unless there is no spread."""

    def metrics(value):
        ends = {f"{metric}/ci95_low": value - spread, f"{metric}/ci95_high": value + spread} if spread else {}
        return {metric: value} | ends

    return [Record("validation", 2 * i, i, metrics(value)) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("records", "loss"),
    [
        (validations(0.4, 0.5, 0.6), ""),
        (validations(0.438, 0.1, 0.0), "collapsed"),
        (validations(0.0, 0.5, 0.0), "collapsed"),  # it rose before it fell
        (validations(0.4, 0.3, 0.2), "worse"),
        (validations(0.4, 0.35), ""),  # within the intervals
        (validations(0.25, 0.0, spread=0.3), ""),  # four prompts
        (validations(0.0, 0.0), ""),
        (validations(-1.0, -0.5), ""),
        (validations(-0.5, -1.0), "worse"),
        (validations(0.9, 0.5, metric="val/pair_accuracy", spread=None), ""),  # no interval, no claim
        (validations(2.0, 1.0, 1.5, metric="val/loss", spread=None), ""),
        (validations(2.0, 1.0, 2.5, metric="val/loss", spread=None), "worse"),
        (validations(0.5), ""),
    ],
)
def test_a_run_that_ends_worse_than_it_began_is_told_from_one_that_does_not(records, loss):
    result = held_out(records)
    assert result.loss == loss
    assert run_totals(records)["held_out"]["loss"] == loss


def test_the_best_is_the_first_of_equals_and_a_loss_is_best_where_it_is_least():
    result = held_out(validations(0.2, 0.6, 0.4, 0.6))
    assert (result.start, result.best, result.end, result.best_iteration) == (0.2, 0.6, 0.6, 1)
    result = held_out(validations(2.0, 1.0, 1.5, metric="val/loss"))
    assert (result.best, result.best_iteration, result.is_as_good_as_start(2.1)) == (1.0, 1, False)


def test_runs_are_compared_by_reward_then_pairs_then_loss():
    both = [Record("validation", 0, 0, {"val/loss": 1.0, "val/pair_accuracy": 0.5, "val/reward/mean": 0.25})]
    assert held_out(both).metric == "val/reward/mean"
    assert held_out([]) is None


def test_totals_of_a_run_add_up():
    totals = run_totals(history())
    assert (totals["val_accuracy_start"], totals["val_accuracy_end"]) == (0.25, 0.75)
    assert (totals["iterations"], totals["samples"], totals["tokens"]) == (2, 8, 48)
    # iterations took 5, of which 1.5 rolling out; validations 1
    assert totals["wall_seconds"] == {"total": 6.0, "rollout": 1.5, "validation": 1.0, "other": 3.5}
    assert totals["cpu_seconds"] == {"total": 2.0, "collect": 1.5, "validation": 0.5}


def test_a_run_without_records_has_totals_too():
    totals = run_totals([])
    assert (totals["val_accuracy_start"], totals["iterations"]) == (None, 0)
