"""``command=compare``: settings that differ, main numbers and curves of runs that are told from their files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmodule.commands import Invocation
from rlmodule.commands.compare import Compare
from rlmodule.commands.parts.comparison import differing_settings, find_runs, numbers_of, sparkline
from rlmodule.core.errors import ConfigError
from rlmodule.records.metrics_log import Record, to_line
from tests.end_to_end.commands import forked


def run_in(folder: Path, values: list[float], *, metric: str = "reward/mean", **settings: Any) -> Path:
    """A run as its files tell it: one value of a metric per step."""
    folder.mkdir(parents=True)
    flat = {"optimizer": {"lr": 0.1, "name": "adamw"}, "seed": 0, "run_dir": str(folder), **settings}
    (folder / "config.yaml").write_text(json.dumps(flat))
    (folder / "command.txt").write_text("command: a test\n")
    records = [Record("iteration", step, step, {metric: value}) for step, value in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(to_line(record) + "\n" for record in records))
    return folder


def compare(*places: Path, **keys: Any) -> int:
    def never(*_: object) -> Any:
        raise AssertionError("comparing needs no run, no model and no rank")

    call = Invocation(never, never, "", never, never)
    return Compare(runs=[str(place) for place in places], **keys)(call)


def test_what_differs_and_what_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_in(tmp_path / "a", [0.25, 0.75, 0.5])
    second = run_in(tmp_path / "b", [0.1, 0.2], optimizer={"lr": 0.3, "name": "adamw"}, name="faster")
    assert compare(first, second, chart=str(tmp_path / "c.png")) == 0
    shown = capsys.readouterr().out
    for words in ("optimizer.lr", "0.1", "0.3", "faster", "0.75", "reward/mean", "running or killed"):
        assert words in shown
    assert "optimizer.name" not in shown, "it is the same in both"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    runs = find_runs([first, second])
    assert differing_settings(runs) == {"optimizer.lr": ["0.1", "0.3"]}
    numbers = numbers_of(runs[0], "reward/mean")
    assert (numbers.first, numbers.best, numbers.best_step, numbers.last) == (0.25, 0.75, 2, 0.5)
    assert numbers_of(runs[1], "val/accuracy").last is None


def test_of_a_loss_the_least_is_the_best(tmp_path: Path) -> None:
    [run] = find_runs([run_in(tmp_path / "a", [3.0, 1.0, 2.0], metric="val/loss")])
    assert numbers_of(run, "val/loss").best == 1.0


def test_a_sweep_stands_for_its_jobs_in_their_order_and_a_run_counts_once(tmp_path: Path) -> None:
    for number in (0, 2, 10, 1):
        run_in(tmp_path / "sweep" / str(number), [0.0])
    run_in(tmp_path / "sweep" / "2" / "warm_start" / "inner", [0.0])
    (tmp_path / "sweep" / "2" / "warm_start" / "inner" / "command.txt").unlink()
    found = find_runs([tmp_path / "sweep", tmp_path / "sweep" / "1"])
    assert [run.root.name for run in found] == ["0", "1", "2", "10"]


def test_a_metric_that_was_nan_all_along_has_no_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path / "a", [float("nan")] * 2, metric="critic/explained_variance")
    assert compare(run, metrics=["critic/explained_variance"], chart=str(tmp_path / "c.png")) == 0
    assert "critic/explained_variance" in capsys.readouterr().out


def test_a_curve_as_text() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, 0, 7) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2, 0, 7) == "▁█", "means of stretches"
    assert sparkline([5, 5], 10, 5, 5) == "▁▁"
    assert sparkline([], 10, 0, 1) == ""


def test_runs_without_metrics_yet_are_told_apart_by_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [run_in(tmp_path / name, [], seed=seed) for name, seed in (("a", 0), ("b", 1))]
    assert compare(*places, chart=str(tmp_path / "c.png")) == 0
    assert "no metrics are there yet" in capsys.readouterr().out
    assert not (tmp_path / "c.png").exists()
    (places[0] / "metrics.jsonl").write_text('{"kind": "step", "st')
    (places[0] / "summary.json").write_text("{")
    assert compare(places[0], chart=None) == 0, "half-written files are those of a run that is writing"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"metrics": ["reward/men"]},
            r"command.metrics=reward/men: no run has logged such a metric. Did you mean reward/mean",
        ),
        ({"chart": "x.txt"}, r"command.chart=x.txt: it is no .png"),
    ],
)
def test_bad_keys_get_words(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compare(run_in(tmp_path / "a", [1.0]), **keys)


def test_places_without_runs_get_words(tmp_path: Path) -> None:
    for places, says in (
        ([], "there is nothing to compare"),
        ([tmp_path], "no run has written there"),
        ([tmp_path / "x"], "there is nothing there"),
    ):
        with pytest.raises(ConfigError, match=says):
            compare(*places)
    broken = run_in(tmp_path / "a", [1.0])
    (broken / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match="it cannot be read"):
        compare(broken)


def test_as_a_user_types_it(finished_run: Path, tmp_path: Path) -> None:
    """Folders behind the command's name, one with an equals sign; nothing is left behind but the chart."""
    other = run_in(tmp_path / "lr=0.3", [0.1, 0.9])
    done = forked("compare", str(finished_run), str(other), cwd=tmp_path)
    assert done.code == 0, done.text
    assert "2 runs" in done.text
    assert "val/accuracy" in done.text
    assert {path.name for path in tmp_path.iterdir()} == {"lr=0.3", "compare.png", "output.txt"}
    assert forked("parity", "folder", cwd=tmp_path).text.startswith(
        "error: command=parity folder: parity takes no words"
    )
