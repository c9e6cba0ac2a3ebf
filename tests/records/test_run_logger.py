"""The contract of a logger: what it is told of a run, in which order; it shows what it can and ignores the rest."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger

from rlmodule.records.metrics_log import read_records
from rlmodule.records.run_logger import RunLogger
from tests.callbacks.fits import STEPS_PER_ITERATION, SmallRun

pytestmark = pytest.mark.filterwarnings("ignore")

CALLBACKS = {"samples": {"num_text_samples": 3}, "metrics": {}}


class Silent(RunLogger, Logger):
    """Shows nothing: all that Lightning asks for, and the contract as it comes."""

    output = "nothing"
    name, version = "silent", ""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        raise AssertionError("metrics come as records")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("settings come with the begin")


class Listener(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, Any]] = []

    def begin(self, hparams, history):
        self.heard.append(("begin", (dict(hparams), list(history))))

    def write_record(self, record):
        self.heard.append(("record", record))

    def write_table(self, name, columns, rows, step):
        self.heard.append(("table", (name, tuple(columns), [list(row) for row in rows], step)))

    def write_histogram(self, name, values, step):
        self.heard.append(("histogram", (name, list(values), step)))

    def end(self):
        self.heard.append(("end", None))


class FullDisk(Silent):
    """Cannot write."""

    output = "the curves of a full disk"

    def write_record(self, record):
        raise OSError(28, "No space left on device")


def test_a_logger_hears_the_whole_run_in_order(tmp_path):
    listener = Listener()
    SmallRun(tmp_path, CALLBACKS, loggers=(listener, Silent())).fit()
    kinds = [kind for kind, _ in listener.heard]
    iteration = ["record"] * STEPS_PER_ITERATION + ["table", "record"] + ["histogram"] * 3
    assert kinds == ["begin", *iteration, *iteration, "end"]
    assert listener.heard[0][1] == ({"seed": 0, "optimizer.lr": 1e-2}, [])
    assert [what for kind, what in listener.heard if kind == "record"] == read_records(tmp_path / "metrics.jsonl")
    (name, columns, rows, step), _ = (what for kind, what in listener.heard if kind == "table")
    assert (name, step, len(rows)) == ("samples/train", STEPS_PER_ITERATION, 3)
    assert columns == ("prompt", "response", "answer", "reward", "finish_reason")
    assert {len(row) for row in rows} == {len(columns)}
    histograms = [what for kind, what in listener.heard if kind == "histogram"]
    assert {name for name, _, _ in histograms} == {
        f"distribution/{n}" for n in ("reward", "response_length", "advantage")
    }
    assert all(values for _, values, _ in histograms)


def test_a_logger_that_cannot_write_is_warned_of_once_and_keeps_nobody_else_from_it(tmp_path):
    listener = Listener()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SmallRun(tmp_path, CALLBACKS, loggers=(FullDisk(), listener)).fit()
    [text] = [str(w.message) for w in caught if "cannot be written" in str(w.message)]
    assert text.startswith("the curves of a full disk cannot be written (No space left on device); training goes on")
    assert [what for kind, what in listener.heard if kind == "record"] == read_records(tmp_path / "metrics.jsonl")
