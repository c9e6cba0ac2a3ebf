"""``metrics.csv``: every record is a line, under the columns of all metrics seen so far."""

from __future__ import annotations

import csv
import math

from rlmodule.loggers import LoggedRun
from rlmodule.loggers.csv import CSVConfig
from rlmodule.records.metrics_log import Record

FIRST = Record("step", 1, 1, {"loss": 0.1, "lr": math.nan})
SECOND = Record("iteration", 1, 1, {"reward": math.inf})
THIRD = Record("step", 2, 2, {"lr": 1e-7, "loss": -2.0})


def lines_of(run_dir):
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def logger_in(run_dir, history=()):
    logger = CSVConfig().connect(LoggedRun(run_dir))
    logger.begin({}, history)
    return logger


def test_a_new_metric_adds_a_column_to_every_line(tmp_path):
    logger = logger_in(tmp_path)
    seen = []
    for record in (FIRST, SECOND, THIRD):
        logger.write_record(record)
        seen.append(lines_of(tmp_path))  # while the run goes on
    logger.finalize("success")
    assert seen[0] == [["kind", "step", "iteration", "loss", "lr"], ["step", "1", "1", "0.1", "nan"]]
    assert (
        seen[2]
        == lines_of(tmp_path)
        == [
            ["kind", "step", "iteration", "loss", "lr", "reward"],
            ["step", "1", "1", "0.1", "nan", ""],
            ["iteration", "1", "1", "", "", "inf"],
            ["step", "2", "2", "-2.0", "1e-07", ""],
        ]
    )


def test_a_resumed_run_goes_on_after_what_was_logged_before_the_checkpoint(tmp_path):
    logger = logger_in(tmp_path)
    for record in (FIRST, SECOND, THIRD):
        logger.write_record(record)
    whole = lines_of(tmp_path)
    resumed = logger_in(tmp_path, history=[FIRST, SECOND])  # the step after the checkpoint is logged again
    resumed.write_record(THIRD)
    assert lines_of(tmp_path) == whole
    for one in (logger, resumed):
        one.finalize("success")


def test_a_run_that_logs_nothing_leaves_a_header(tmp_path):
    logger_in(tmp_path).finalize("failed")
    assert lines_of(tmp_path) == [["kind", "step", "iteration"]]
