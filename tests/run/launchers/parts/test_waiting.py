"""Ranks that wait are told who they are, are watched like any other, and outlive nobody."""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from rlmodule import cli
from rlmodule.commands.parts.sweep import JobResult
from rlmodule.core.errors import TrainingError
from rlmodule.run.launchers import Job, local
from rlmodule.run.launchers.parts.supervision import WORKER_FLAG
from rlmodule.run.launchers.parts.waiting import WaitingRank

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[4]
NEVER = 600.0


def told(place, arguments):
    place.write_text(repr((list(arguments), sorted(os.environ), os.environ["RANK"])))
    os.write(1, b"last words\n")
    return 7


def patient(arguments):
    time.sleep(NEVER)
    return 0


def test_it_is_told_its_arguments_environment_and_log(tmp_path, monkeypatch):
    monkeypatch.setenv("ONLY_THE_SUPERVISOR_S", "1")
    rank = WaitingRank(partial(told, tmp_path / "told"))
    assert rank.poll() is None and not (tmp_path / "told").exists(), "it waits"
    rank.start(["--worker", "RUN"], {"RANK": "3"}, tmp_path / "log")
    assert (rank.wait(60), rank.poll(), rank.returncode) == (7, 7, 7)
    assert eval((tmp_path / "told").read_text()) == (["--worker", "RUN"], ["RANK"], "3")
    assert (tmp_path / "log").read_text() == "last words\n"
    rank.dismiss()  # one that was started is the supervisor's


def test_it_has_a_name_and_ends_by_signals():
    rank = WaitingRank(patient)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.05)
    rank.start([], {"RANK": "12"}, None)
    while Path(f"/proc/{rank.pid}/comm").read_text() != "rank 12\n":
        time.sleep(0.01)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(60) == -signal.SIGTERM
    rank.kill()  # nobody is there, and nobody else is hit


def test_one_that_is_not_needed_leaves_without_a_word(capfd):
    rank = WaitingRank(patient)
    rank.dismiss()
    assert rank.returncode == -signal.SIGKILL
    assert capfd.readouterr() == ("", "")


def test_it_clears_up_what_it_made_itself_and_nothing_of_the_supervisor_s(tmp_path):
    own = tempfile.TemporaryDirectory(dir=tmp_path)
    atexit.register(own.cleanup)  # as wandb does
    kept = []

    def make(arguments):
        kept.append(tempfile.TemporaryDirectory(dir=tmp_path, prefix="rank"))
        return 0

    rank = WaitingRank(make)
    rank.start([], {"RANK": "0"}, None)
    assert rank.wait(60) == 0
    atexit.unregister(own.cleanup)
    assert [str(path) for path in tmp_path.iterdir()] == [own.name]
    own.cleanup()


def test_kill_9_of_a_supervisor_that_checks_leaves_none_waiting():
    code = (
        "import time\nfrom rlmodule.run.launchers.parts.waiting import WaitingRank\n"
        "print(*(WaitingRank(lambda arguments: 0).pid for _ in range(3)), flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as supervisor:
        pids = supervisor.stdout.readline().split()
        supervisor.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass(frozen=True)
class NothingToDo:
    """A run, and a command on it."""

    on_phase: Callable[[str], None] | None = None

    def on_rank(self, run):
        assert isinstance(run, NothingToDo)


def test_a_rank_of_a_job_does_not_answer_for_the_jobs_before_it(tmp_path, monkeypatch):
    JobResult(0, [], 2, None, "it failed").save(tmp_path / "0")
    monkeypatch.setattr(cli, "sweep_dirs", [tmp_path])
    monkeypatch.setattr(cli, "load_run", lambda arguments: (NothingToDo(), NothingToDo()))
    rank = WaitingRank(cli.main_of_rank)
    rank.start([WORKER_FLAG, "RUN"], {"RANK": "0"}, None)
    assert rank.wait(60) == 0


def fails_as_rank_1(run, arguments):
    if os.environ["RANK"] == "1":
        return 9
    return patient(arguments)


def test_a_launcher_starts_those_that_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "can_fork", lambda: True)
    launcher = local.Local()
    waiting = launcher.ready(2, "cpu", partial(fails_as_rank_1, tmp_path))
    with pytest.raises(TrainingError, match="rank 1 exited with code 9"):
        launcher(Job(("/no/such/program",), tmp_path, 2, waiting=waiting))
    assert all(rank.returncode is not None for rank in waiting)


def test_one_that_died_while_it_waited_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "can_fork", lambda: True)
    launcher = local.Local()
    waiting = launcher.ready(2, "cpu", patient)
    waiting[1].kill()  # as the system does when it is short of memory
    waiting[1].wait(60)
    with pytest.raises(TrainingError, match="rank 1 was ended by SIGKILL"):
        launcher(Job(("/no/such/program",), tmp_path, 2, waiting=waiting))


def test_where_not_all_can_be_forked_none_waits(monkeypatch):
    made, fork = [], os.fork

    def fork_once():
        if made:
            raise BlockingIOError("no more processes")
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(local, "can_fork", lambda: True)
    monkeypatch.setattr(os, "fork", fork_once)
    open_files = len(os.listdir("/proc/self/fd"))
    assert list(local.Local().ready(2, "cpu", patient)) == []
    assert not Path(f"/proc/{made[0]}").exists(), "the first one is gone"
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize(("device", "forks"), [("cuda", True), ("cpu", False)])
def test_none_wait_where_a_fork_would_not_do(monkeypatch, device, forks):
    monkeypatch.setattr(local, "can_fork", lambda: forks)
    assert list(local.Local().ready(2, device, patient)) == []
