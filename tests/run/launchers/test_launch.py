"""The supervisor starts the ranks, tells them their places, and lets none of them outlive the others or itself.

The ranks here are scripts of a few lines; whole runs are in ``end_to_end/``.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlmodule.core.errors import TrainingError
from rlmodule.run.launchers import Job
from rlmodule.run.launchers.local import Local
from rlmodule.run.launchers.parts import heartbeat, place
from rlmodule.run.launchers.parts import supervision as launch

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
SLEEP = "import time; time.sleep(600)"
# Leaves its number beside the log and waits for the others, so that nobody is killed before it has started.
STARTED = """
import os, sys, time
from pathlib import Path
run, rank = Path(sys.argv[2]), int(os.environ["LOCAL_RANK"])
(run / f"starting_{rank}").write_text(str(os.getpid()))
(run / f"starting_{rank}").rename(run / f"started_{rank}")
while len(list(run.glob("started_*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes the script that is every rank."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def write(body, opening=STARTED):
        path = tmp_path / "rank.py"
        path.write_text(opening + textwrap.dedent(body))
        return (str(path),)

    return write


def pids(run):
    return [int((run / f"started_{rank}").read_text()) for rank in range(len(list(run.glob("started_*"))))]


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def test_every_rank_is_told_its_place(tmp_path, script):
    body = """
    names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "RLMODULE_STORE", "RLMODULE_SUPERVISOR")
    print(sys.argv[1], *(os.environ[n] for n in names), "RANK" in os.environ)
    (run / f"place_{rank}").write_text(" ".join(os.environ[n] for n in names))
    """
    assert Local()(Job(script(body), tmp_path, 3)) == 0
    places = [(tmp_path / f"place_{rank}").read_text().split() for rank in range(3)]
    assert [place[:4] for place in places] == [[str(rank), "0", "3", "127.0.0.1"] for rank in range(3)]
    assert len({place[4] for place in places}) == 1, "they meet in one place"
    assert not Path(places[0][4]).parent.exists(), "which is gone afterwards"
    assert {place[5] for place in places} == {str(os.getpid())}
    assert (tmp_path / "logs" / "rank_2.log").read_text().startswith("--worker 2 ")
    assert not (tmp_path / "logs" / "rank_0.log").exists(), "rank 0 speaks to the terminal"


def test_an_error_of_the_user_s_ends_all_with_its_code(tmp_path, script):
    body = f"""
    if rank == 0:
        raise SystemExit({launch.USER_ERROR})
    {SLEEP}
    """
    assert Local()(Job(script(body), tmp_path, 2)) == launch.USER_ERROR
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.parametrize(
    ("death", "said"),
    [("os.kill(os.getpid(), 9)", "rank 1 was ended by SIGKILL"), ("raise SystemExit(7)", "rank 1 exited with code 7")],
)
def test_a_rank_that_dies_is_named_and_takes_the_others_along(tmp_path, script, death, said):
    body = f"""
    if rank == 1:
        print("last words", flush=True)
        {death}
    {SLEEP}
    """
    with pytest.raises(TrainingError) as caught:
        Local()(Job(script(body), tmp_path, 3))
    log = tmp_path / "logs" / "rank_1.log"
    assert str(caught.value).startswith(said)
    assert str(log) in str(caught.value)
    assert "No state was saved yet" in str(caught.value)
    assert log.read_text() == "last words\n"
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.parametrize(
    ("death", "said", "later"),
    [
        ("os.kill(os.getpid(), 9)", "rank 1 was ended by SIGKILL", 0.0),
        ("os._exit(7)", "rank 1 exited with code 7", 0.5),
    ],
)
def test_the_rank_that_died_is_named_and_not_the_one_that_missed_it(tmp_path, script, death, said, later):
    """Rank 0 fails in its turn, as it does when a connection is closed by its peer."""
    body = f"""
    if rank == 1:
        {death}
    while Path(f"/proc/{{(run / 'started_1').read_text()}}/cmdline").read_bytes():
        time.sleep(0.01)  # until it is dead, though not yet waited for
    time.sleep({later})
    os._exit(1)
    """
    with pytest.raises(TrainingError) as caught:
        Local()(Job(script(body), tmp_path, 2))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("rank", [0, 1])
def test_point_22_a_bug_has_one_exit_code_and_one_traceback_whatever_rank_has_it(tmp_path, script, capfd, rank):
    """The rank that lost its peer to it says so in a word, and with a code of its own."""
    body = f"""
    if rank == {rank}:
        raise ZeroDivisionError("planted")
    time.sleep(0.3)
    os._exit({launch.LOST_PEERS})
    """
    assert Local()(Job(script(body), tmp_path, 2)) == launch.BUG
    said = capfd.readouterr().err
    assert said.count("Traceback (most recent call last)") == 1
    assert "ZeroDivisionError: planted" in said


def test_point_14_a_frozen_rank_is_named_with_its_phase_and_all_are_ended(tmp_path, script):
    beating = f"""
    sys.path.insert(0, {str(ROOT)!r})
    from rlmodule.run.launchers.parts import supervision as launch
    launch.end_with_supervisor()("update")
    time.sleep(0.5)
    if rank == 1:
        os.kill(os.getpid(), 19)
    {SLEEP}
    """
    (tmp_path / "checkpoints" / "iteration_000003").mkdir(parents=True)
    (tmp_path / "checkpoints" / "iteration_000004.writing").mkdir()
    with pytest.raises(
        TrainingError, match=r"rank 1 \(process \d+ on .*\) froze in phase 'update'.*trainer.timeout"
    ) as caught:
        Local()(Job(script(beating), tmp_path, 2, timeout=2.5))
    assert f"Go on from iteration_000003 with resume={tmp_path}" in str(caught.value)
    assert not any(map(is_running, pids(tmp_path)))


def test_a_supervisor_that_was_frozen_itself_blames_no_rank(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    heartbeat.file_of(tmp_path, 0).write_text("{}")
    signs = heartbeat.Heartbeats(tmp_path, range(1), timeout=20)

    def said_at(now):
        clock[0] = now
        return signs.silent()

    assert not any(map(said_at, (2.0, 4.0, 1000.0, 1002.0))), "it has just come back"
    assert not any(map(said_at, range(1004, 1022, 2)))
    assert said_at(1024.0).startswith("rank 0")


def test_point_19_ranks_meet_without_a_port(tmp_path, script):
    body = """
    assert "MASTER_PORT" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert Path(os.environ["RLMODULE_STORE"]).parent.stat().st_mode & 0o077 == 0, "for this user alone"
    """
    assert Local()(Job(script(body), tmp_path, 2)) == 0


def test_a_rank_0_that_dies_is_named_without_a_log(tmp_path, script):
    body = f"""
    if rank == 0:
        os.kill(os.getpid(), 9)
    {SLEEP}
    """
    with pytest.raises(TrainingError) as caught:
        Local()(Job(script(body), tmp_path, 2))
    assert str(caught.value).startswith("rank 0 was ended by SIGKILL. ")


def test_a_rank_that_ignores_its_end_is_killed(tmp_path, script, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.5)
    body = f"""
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run / f"deaf_{{rank}}").touch()
    while len(list(run.glob("deaf_*"))) < 2:
        time.sleep(0.01)
    if rank == 0:
        os._exit(3)
    {SLEEP}
    """
    assert Local()(Job(script(body), tmp_path, 2)) == 3
    assert not any(map(is_running, pids(tmp_path)))


SUPERVISOR = """
import sys
from pathlib import Path
from rlmodule.run.launchers import Job
from rlmodule.run.launchers.local import Local
from rlmodule.run.launchers.parts import supervision as launch
launch._REPEAT_SECONDS = 1.0
raise SystemExit(Local()(Job((sys.argv[1],), Path(sys.argv[2]), 2)))
"""
WATCHED = "from rlmodule.run.launchers.parts import supervision as launch\nlaunch.end_with_supervisor()\n" + STARTED


@contextmanager
def supervisor(rank_script, run):
    """A supervisor of two ranks; ended with them, whatever the test says."""
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, *rank_script, str(run)], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in filter(is_running, pids(run)):
            os.kill(pid, signal.SIGKILL)


def test_kill_9_of_the_supervisor_leaves_no_rank_behind(tmp_path, script):
    with supervisor(script(SLEEP, WATCHED), tmp_path) as process:
        wait_until(lambda: len(list(tmp_path.glob("started_*"))) == 2)
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_running, pids(tmp_path))))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_s_warning_reaches_every_rank(tmp_path, script, number):
    body = """
    import signal
    def note(number, frame):
        (run / f"warned_{rank}").write_text(signal.Signals(number).name)
        raise SystemExit(75)
    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGUSR1, note)
    (run / f"ready_{rank}").touch()
    time.sleep(600)
    """
    with supervisor(script(body), tmp_path) as process:
        wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
        process.send_signal(number)
        code = process.wait(20)
    assert [(tmp_path / f"warned_{rank}").read_text() for rank in range(2)] == [number.name] * 2
    assert code == launch.PREEMPTED, "what ranks that have saved their state exit with"


def test_a_later_signal_ends_all_at_once(tmp_path, script):
    body = """
    import signal
    def note(number, frame):
        if (run / f"warned_{rank}").exists():
            os._exit(128 + number)
        (run / f"warned_{rank}").touch()
    signal.signal(signal.SIGTERM, note)
    (run / f"ready_{rank}").touch()
    while True:
        time.sleep(0.01)
    """
    with supervisor(script(body), tmp_path) as process:
        wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: len(list(tmp_path.glob("warned_*"))) == 2)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.1)
        assert process.poll() is None, "the same request again changes nothing: it waits for them to save"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) != 0
        assert not any(map(is_running, pids(tmp_path)))


def test_outside_a_supervisor_nobody_watches(monkeypatch):
    monkeypatch.delenv("RLMODULE_SUPERVISOR", raising=False)
    launch.end_with_supervisor()
    assert "supervisor-watch" not in [thread.name for thread in threading.enumerate()]


def test_a_process_of_its_own_does_not_know_that_it_has_peers(tmp_path, script, monkeypatch):
    outside = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "1",
        "SLURM_PROCID": "1",
        "KEPT": "yes",
    }
    for name, value in outside.items():
        monkeypatch.setenv(name, value)
    body = f"""
    import os, sys
    from pathlib import Path
    assert os.environ["KEPT"] == "yes"
    assert not {set(outside) - {"KEPT"}!r} & os.environ.keys()
    (Path(sys.argv[2]) / "flag").write_text(sys.argv[1])
    """
    launch.run_alone(script(body, ""), tmp_path)
    assert (tmp_path / "flag").read_text() == launch.WARM_START_FLAG


def test_a_warm_start_that_fails_is_an_error(tmp_path, script):
    with pytest.raises(TrainingError, match="exited with code 4"):
        launch.run_alone(script("raise SystemExit(4)", ""), tmp_path)


OUTSIDE = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID")


@pytest.mark.parametrize(
    ("environment", "launched", "rank"),
    [
        ({}, False, 0),
        ({"RANK": "3", "WORLD_SIZE": "4"}, True, 3),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, True, 1),
        ({"RANK": "3"}, False, 0),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}, True, 2),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, False, 0),  # srun with one task
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False, 0),  # a batch script that starts train.py itself
    ],
)
def test_who_started_this_process(monkeypatch, environment, launched, rank):
    for name in OUTSIDE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place.launched_from_outside() == launched
    assert place.outside_rank() == rank
