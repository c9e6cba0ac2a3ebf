from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from rlmodule.records.metrics_log import (
    MetricsLog,
    PhaseClock,
    Record,
    RecordFile,
    atomic_write,
    from_line,
    read_records,
    to_line,
    truncate_after,
)


def test_a_record_survives_its_line_exactly():
    record = Record("step", 3, 1, {"actor/pg_loss": 0.1 + 0.2, "actor/lr": 1e-5, "zero": -0.0})
    assert from_line(to_line(record)) == record


def test_numbers_json_has_no_word_for_are_null_and_named():
    record = Record("step", 3, 1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    line = json.loads(to_line(record), parse_constant=pytest.fail)
    assert (line["a"], line["b"], line["c"], line["d"]) == (None, None, None, 1.0)
    assert (line["nan"], line["inf"], line["-inf"]) == (["a"], ["b"], ["c"])
    back = from_line(to_line(record)).metrics
    assert math.isnan(back["a"])
    assert (back["b"], back["c"]) == (math.inf, -math.inf)
    assert set(back) == set(record.metrics)


def test_every_line_is_on_disk_before_the_next_one_is_made(tmp_path):
    script = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "from rlmodule.records.metrics_log import Record, RecordFile\n"
        "file = RecordFile(Path(sys.argv[1]))\n"
        "for step in range(1, 51): file.write(Record('step', step, 1, {f'metric/{i}': float(i) for i in range(40)}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "metrics.jsonl"
    assert subprocess.run([sys.executable, "-c", script, str(path)]).returncode == -signal.SIGKILL
    assert [record.step for record in read_records(path)] == list(range(1, 51))


def test_rewinding_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = RecordFile(path)
    for step in range(1, 10):
        file.write(Record("step", step, 1, {"a": float(step)}))
    file.close()
    with path.open("a") as torn:
        torn.write('{"kind": "step", "st')
    assert [record.step for record in truncate_after(path, 6)] == [1, 2, 3, 4, 5, 6]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_begins_with_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line(Record("step", 1, 1, {})) + "\n")
    assert truncate_after(path, None) == []
    assert path.read_text() == ""


def test_rewinding_without_a_file_keeps_nothing(tmp_path):
    assert truncate_after(tmp_path / "metrics.jsonl", 6) == []


def test_a_file_whose_writing_fails_is_left_as_it_was(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")

    def write_half() -> None:
        with atomic_write(path) as aside:
            aside.write_text("ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_time_is_counted_in_one_phase_at_a_time():
    clock = PhaseClock("collect")
    time.sleep(0.02)
    clock.switch("update")
    time.sleep(0.01)
    elapsed = clock.read()
    assert elapsed["collect"].seconds >= 0.02
    assert elapsed["update"].seconds >= 0.01
    assert elapsed["update"].seconds < clock.read()["update"].seconds  # it goes on


def test_an_interrupting_phase_gives_the_word_back_and_says_how_long_it_took():
    metrics_log, phases, elapsed = MetricsLog(), [], []
    metrics_log.subscribe(on_phase=phases.append)
    metrics_log.begin_iteration(0)
    for _ in range(2):
        with metrics_log.phase("validate") as spent:
            time.sleep(0.01)
        elapsed.append(spent)
    assert all(spent.seconds >= 0.01 for spent in elapsed)
    assert (
        sum(spent.seconds for spent in elapsed) <= metrics_log.clock.read()["validate"].seconds
    )  # no lap counts another's time
    assert phases == ["collect", "validate", "collect", "validate", "collect"]
    assert metrics_log.iteration == 1


def test_every_listener_hears_every_record():
    metrics_log, heard = MetricsLog(), []
    metrics_log.subscribe(on_record=heard.append)
    metrics_log.subscribe(on_record=heard.append)
    record = Record("step", 1, 1, {})
    metrics_log.add(record)
    assert heard == [record, record]
    assert metrics_log.records == [record]
