"""Killed runs go on where they were: bit for bit on one process, with the same numbers on two; nobody is left behind."""

import json
import os
import signal
import time

import pytest

from rlmodule.checkpoint.state import folder_of
from rlmodule.records.metrics_log import read_records
from tests.end_to_end.commands import Command, children_of, forked, is_running, wait_until, with_warm_start
from tests.end_to_end.conftest import ITERATIONS
from tests.end_to_end.test_layouts import assert_same_run
from tests.helpers.runs import numbers, rollouts

pytestmark = pytest.mark.ranks

COMMON = (f"trainer.max_epochs={ITERATIONS}", "trainer.num_threads=1", "callbacks.report.curves=false")


def test_kill_9_and_resume_gives_the_run_that_was_never_stopped(first_run, tmp_path):
    """Killed in the second iteration; ``resume=auto`` finds the run by itself."""
    run_dir = with_warm_start(tmp_path / "outputs" / "2026-01-01" / "00-00-00", first_run)
    command = Command([f"run_dir={run_dir}", *COMMON], tmp_path)
    wait_until(folder_of(run_dir / "checkpoints", 1).exists, command)
    command.kill()
    assert len(rollouts(run_dir)) < ITERATIONS
    assert not (run_dir / "policy").exists()

    done = forked("resume=auto", *COMMON, cwd=tmp_path)
    assert done.code == 0, done.text
    assert "warm start:" not in done.text
    assert rollouts(run_dir) == rollouts(first_run)
    assert numbers(read_records(run_dir / "metrics.jsonl")) == numbers(read_records(first_run / "metrics.jsonl"))
    for name in ("policy/model.safetensors", "policy/config.json"):
        assert (run_dir / name).read_bytes() == (first_run / name).read_bytes(), name
    assert json.loads((run_dir / "summary.json").read_text())["finished"] is True
    assert (run_dir / "command.txt").read_text().count("command: ") == 2
    assert [path.name for path in (tmp_path / "outputs").glob("*/*")] == ["00-00-00"], "no second directory"


def test_a_dead_rank_ends_the_run_and_two_ranks_go_on(first_run, tmp_path):
    """kill -9 of rank 1: the error names it and its log, no process is left; the resumed run ends with the same numbers."""
    run_dir = with_warm_start(tmp_path / "run", first_run)
    command = Command([f"run_dir={run_dir}", "trainer.devices=2", *COMMON], tmp_path)
    wait_until(lambda: sorted(command.ranks()) == [0, 1], command)
    ranks = command.ranks()
    wait_until(folder_of(run_dir / "checkpoints", 1).exists, command)
    os.kill(ranks[1], signal.SIGKILL)
    ended = command.wait()
    assert ended.code == 2
    assert "error: rank 1 was ended by SIGKILL" in ended.text
    assert str(run_dir / "logs" / "rank_1.log") in ended.text
    assert "Traceback" not in ended.text.split("error: rank 1")[-1]
    assert not any(map(is_running, ranks.values()))
    assert children_of(command.pid) == []

    done = forked(f"run_dir={run_dir}", "resume=auto", "trainer.devices=2", *COMMON, cwd=tmp_path)
    assert done.code == 0, done.text
    assert_same_run(run_dir, first_run)


def test_kill_9_of_the_supervisor_leaves_no_rank_behind(tmp_path):
    command = Command(
        ["run_dir=run", "debug=fast", "environment.train_size=64", "trainer.max_epochs=1000", "trainer.devices=2"],
        tmp_path,
    )
    wait_until(lambda: sorted(command.ranks()) == [0, 1], command)
    ranks = command.ranks()
    command.kill()
    deadline = time.monotonic() + 60
    while any(map(is_running, ranks.values())):
        assert time.monotonic() < deadline, "a rank outlived its supervisor by a minute"
        time.sleep(0.1)
