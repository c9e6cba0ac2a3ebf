from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from rlmodule.callbacks.parts.best import best_checkpoint
from rlmodule.callbacks.parts.context import RunContext
from rlmodule.callbacks.report import (
    NOISY_FROM,
    PANELS,
    draw_curves,
    draw_panel,
    nothing_trained,
    output_paths,
    table,
    warning,
)
from rlmodule.checkpoint.state import folder_of, write_folder
from rlmodule.module import Counters
from rlmodule.records.metrics_log import Record
from rlmodule.records.rows import without_nan
from rlmodule.records.run_directory import RunDirectory
from rlmodule.records.summary import Change, held_out
from tests.callbacks.builders import TOKENIZER


def steps(count: int) -> list[Record]:
    return [Record("step", i, 1, {"actor/pg_loss": (-1.0) ** i, "actor/clip_frac": 0.1}) for i in range(1, count + 1)]


@pytest.mark.parametrize(
    "records", [steps(1), steps(NOISY_FROM * 3), [Record("step", 1, 1, {"actor/pg_loss": math.nan})]]
)
def test_any_history_gives_a_picture(tmp_path, records):
    draw_curves(records, tmp_path / "curves.png", dpi=20)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_panel_names_what_it_draws_and_measures():
    axes = Figure().subplots()
    draw_panel(axes, PANELS[1], steps(3))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["policy loss", "clipped tokens (right)"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer steps", "loss; KL in nats per token")


def test_an_empty_panel_says_that_it_is_empty():
    axes = Figure().subplots()
    draw_panel(axes, PANELS[2], steps(3))
    assert [text.get_text() for text in axes.texts] == ["nothing was measured"]


def test_a_run_without_an_optimizer_step_says_so_and_why():
    """Where all rewards are equal a run ends as any other, and everything about it looks trained."""
    assert nothing_trained(Counters(steps=4, optimizer_steps=1, zero_gradient=3)) == ""
    words = nothing_trained(Counters(steps=4, zero_gradient=3, empty=1))
    assert words.startswith("no optimizer step was taken")
    assert (
        "3 in which no sample could have a gradient (rewards were equal in every group) and 1 without a token" in words
    )


def test_a_long_curve_is_smoothed_over_its_faint_self():
    axes = Figure().subplots()
    draw_panel(
        axes, PANELS[1], [Record("step", r.step, 1, {"actor/pg_loss": r.metrics["actor/pg_loss"]}) for r in steps(80)]
    )
    faint, smooth = axes.get_lines()
    assert list(faint.get_ydata()) == [(-1.0) ** i for i in range(1, 81)]
    assert abs(smooth.get_ydata()[-1]) < 1e-12  # the mean of an even number of them


def test_the_table_reads_start_and_end():
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table([Change("mean reward", "0.170", "0.870")], "run finished"))
    assert "run finished" in capture.get()
    assert "mean reward" in capture.get()
    assert capture.get().index("0.170") < capture.get().index("0.870")


def test_the_best_stands_between_start_and_end_where_there_is_one():
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table([Change("held-out reward", "0.1", "0.2", "0.3"), Change("loss", "1", "2")], "run finished"))
    assert "start" in capture.get()
    assert "best" in capture.get()
    assert capture.get().index("0.1") < capture.get().index("0.3") < capture.get().index("0.2")


def validated(*rewards):
    ends = ("/ci95_low", "/ci95_high")
    return [
        Record("validation", 2 * i, i, {"val/reward/mean": r, **{f"val/reward/mean{end}": r for end in ends}})
        for i, r in enumerate(rewards)
    ]


def saved(run_dir, iteration, value):
    entries = {"step": 2 * iteration, "best": {"metric": "val/reward/mean", "mode": "max", "value": value}}
    assert write_folder(folder_of(run_dir / "checkpoints", iteration), lambda aside: None, entries) is None


def test_a_dead_policy_is_never_the_best(tmp_path):
    """From 0.438 to 0: no checkpoint is named the best; one that is as good as the start is."""
    saved(tmp_path, 2, 0.0)
    directory = RunDirectory(tmp_path)
    assert "best" not in output_paths(directory, validated(0.438, 0.1, 0.0))
    saved(tmp_path, 1, 0.5)
    best = output_paths(directory, validated(0.438, 0.5, 0.0))["best"]
    assert best == str(tmp_path / "checkpoints" / "iteration_000001")


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        (
            (0.438, 0.1, 0.0),
            ["NOTHING IS LEFT", "0.438 at the start", "0.000 at the end", "use that one", "is not exported"],
        ),
        (
            (0.2, 0.6, 0.0),
            ["NOTHING IS LEFT", "0.600 at best (after iteration 1)", "iteration_000001, and is what was exported"],
        ),
        ((0.4, 0.3, 0.2), ["ENDS WORSE THAN IT BEGAN", "optimizer.lr is 0.01"]),
    ],
)
def test_a_run_that_falls_says_so_in_large_words(tmp_path, rewards, says):
    context = RunContext(tmp_path, True, 2, {}, {"optimizer.lr": 0.01}, None, TOKENIZER)
    saved(tmp_path, 1, rewards[1])
    saved(tmp_path, 2, rewards[2])
    records = validated(*rewards)
    console = Console(width=200)
    with console.capture() as capture:
        best = best_checkpoint(RunDirectory(tmp_path), records)
        console.print(warning(held_out(records), context, best, is_exported=best is not None))
    for words in says:
        assert words in capture.get()


def test_only_what_is_there_is_pointed_at(tmp_path):
    (tmp_path / "checkpoints" / "iteration_000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "iteration_000003").mkdir()
    (tmp_path / "checkpoints" / "iteration_000004.writing").mkdir()
    found = output_paths(RunDirectory(tmp_path))
    assert found == {"run": str(tmp_path), "checkpoint": str(tmp_path / "checkpoints" / "iteration_000003")}


def test_json_gets_null_for_what_it_cannot_write():
    assert without_nan({"a": math.nan, "b": {"c": math.inf, "d": 1}}) == {"a": None, "b": {"c": None, "d": 1}}
