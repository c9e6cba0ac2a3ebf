from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from rlmodule.callbacks.report import NOISY_FROM, PANELS, draw_curves, draw_panel, output_paths, table, without_nan
from rlmodule.records.metrics_log import Record
from rlmodule.records.run_directory import RunDirectory
from rlmodule.records.summary import Change


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


def test_only_what_is_there_is_pointed_at(tmp_path):
    (tmp_path / "checkpoints" / "iteration_000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "iteration_000003").mkdir()
    (tmp_path / "checkpoints" / "iteration_000004.writing").mkdir()
    found = output_paths(RunDirectory(tmp_path))
    assert found == {"run": str(tmp_path), "checkpoint": str(tmp_path / "checkpoints" / "iteration_000003")}


def test_json_gets_null_for_what_it_cannot_write():
    assert without_nan({"a": math.nan, "b": {"c": math.inf, "d": 1}}) == {"a": None, "b": {"c": None, "d": 1}}
