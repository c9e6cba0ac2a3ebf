from __future__ import annotations

import pytest
from rich.console import Console

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.progress import State, finest_phase, format_duration, validation_line
from rlmodule.core.errors import ConfigError
from rlmodule.records.metrics_log import Record

ITERATION = {"reward/mean": 0.5, "response_length/mean": 5.25, "perf/tokens_per_s": 1234.5, "timing_s/iteration": 2.0}


@pytest.mark.parametrize(
    ("behind", "activity"), [((), "rollout"), (("rollout",), "reward"), (("rollout", "reward", "plan"), "score")]
)
def test_what_collecting_is_at_follows_from_what_it_has_behind_it(behind, activity):
    assert finest_phase(dict.fromkeys(behind, 1.0)) == activity


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03")])
def test_time_left_is_read_at_a_glance(seconds, shown):
    assert format_duration(seconds) == shown


def test_a_line_shows_what_was_ever_seen_and_nothing_else():
    state = State(max_iterations=10)
    state.enter("update", 3)
    record = Record("iteration", 12, 3, ITERATION)
    state.take(record)
    line = state.iteration_line(record).rsplit("  ", 1)[0]
    assert line == "iteration  3/10  step 12  reward 0.500  length 5.2  1,234 tokens/s  2.0 s"
    state.take(Record("validation", 12, 3, {"val/reward/mean": 0.75}))
    assert "val 0.750" in state.iteration_line(record)


def test_imitation_shows_its_loss():
    state = State(max_iterations=10, has_rewards=False)
    state.take(Record("step", 1, 1, {"actor/loss": 1.5}))
    assert state.shown_metrics(()) == ["loss 1.5000"]


def test_time_left_is_known_after_an_iteration_and_counts_those_before_a_resume_as_done():
    state = State(max_iterations=10)
    state.enter("collect", 8)
    assert (state.done, state.seconds_left) == (7, None)
    state.take(Record("iteration", 32, 8, ITERATION))
    left = state.seconds_left
    assert left is not None
    assert left >= 0
    state.take(Record("iteration", 40, 10, ITERATION))
    assert state.seconds_left == 0


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (ITERATION | {"val/reward/mean": 0.75}, "reward 0.500 val 0.750"),
        ({"reward_model/loss": 0.5, "val/pair_accuracy": 0.9}, "loss 0.5000 pairs 0.900"),
    ],
)
def test_the_bar_fits_a_narrow_terminal(said, shown):
    state = State(max_iterations=100, has_rewards="reward/mean" in said)
    state.enter("update", 42)
    state.take(Record("iteration", 168, 42, said))
    console = Console(width=80, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(state)
    assert capture.get().count("\n") == 1
    assert "update" in capture.get()
    assert "42/100" in capture.get()
    assert shown in capture.get()


def test_a_validation_line_says_what_was_examined_and_nothing_else():
    answers = {"val/accuracy": 0.25, "val/response_length": 5.0}
    pairs = {"val/pair_accuracy": 0.75, "val/margin": 0.5, "val/loss": 0.625}
    said = "pair accuracy 0.750  margin 0.500  loss 0.6250"
    for metrics, words in (
        (answers, "accuracy 0.250  length 5.0"),
        (pairs, said),
        (answers | pairs, f"accuracy 0.250  length 5.0  {said}"),
        (answers | {"val/reward/mean": 0.25}, "accuracy 0.250  length 5.0"),
        ({"val/reward/mean": 0.5, "val/reward/format": 1.0}, "reward 0.500"),
        (
            {"val/reward/mean": 0.5, "val/best@4": 0.75, "val/pass@2": 0.6, "val/a/pass@2": 0.1, "val/maj@4": 0.5},
            "reward 0.500  best@4 0.750  pass@2 0.600  maj@4 0.500",
        ),
        ({"val/loss": 1.0, "val/perplexity": 2.71828}, "loss 1.0000  perplexity 2.718"),
    ):
        record = Record("validation", 8, 2, {**metrics, "timing_s/validation": 0.5})
        assert validation_line(record) == f"validation  step 8  {words}  0.5 s"


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="refresh_per_second=0"):
        CALLBACKS.get("progress")(refresh_per_second=0)
    with pytest.raises(ConfigError, match="every_n_iterations=-1"):
        CALLBACKS.get("validation")(every_n_iterations=-1)
    with pytest.raises(ConfigError, match="num_text_samples=-1"):
        CALLBACKS.get("samples")(num_text_samples=-1)
    with pytest.raises(ConfigError, match="dpi=0"):
        CALLBACKS.get("report")(dpi=0)
