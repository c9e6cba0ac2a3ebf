"""Ranks on a Ray cluster end as they do under every launcher: the one that died is named, signals reach all, none is left.

The ranks are scripts of a few lines; a whole run is in ``end_to_end/test_clusters.py``. Needs the extra ``ray``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.run.launchers import LAUNCHERS
from rlmodule.run.launchers.parts.supervision import PREEMPTED, USER_ERROR
from rlmodule.run.launchers.ray import RankHost

ROOT = Path(__file__).parents[3]
HAS_RAY = find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'rlmodule[ray]'")
PATIENCE = 280.0  # seconds; a cluster takes some to start

SUPERVISOR = """
import sys
from functools import partial
from pathlib import Path
from rlmodule.cli import reported
from rlmodule.run.launchers import Job
from rlmodule.run.launchers.ray import RayLauncher
from rlmodule.run.launchers.parts import supervision
supervision._REPEAT_SECONDS = 1.0
job = Job((sys.argv[1],), Path(sys.argv[2]), int(sys.argv[3]), num_nodes=int(sys.argv[4]), timeout=12.0)  # of silence
raise SystemExit(reported(partial(RayLauncher(), job)))
"""
RANK = """
import os, sys, time
from pathlib import Path
from rlmodule.run.launchers.parts.supervision import end_with_supervisor
enter = end_with_supervisor()
run, rank = Path(sys.argv[2]), int(os.environ["RANK"])
(run / f"starting_{rank}").write_text(str(os.getpid()))
(run / f"starting_{rank}").rename(run / f"started_{rank}")
while len(list(run.glob("started_*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""
SLEEP = "\ntime.sleep(600)"


@contextmanager
def started(tmp_path, body, *, processes=2, nodes=1):
    """A supervisor of these ranks in an interpreter of its own; none of them is left afterwards."""
    script = tmp_path / "rank.py"
    script.write_text(RANK + textwrap.dedent(body))
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(script), str(tmp_path), str(processes), str(nodes)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
        process.wait(PATIENCE)
        deadline = time.monotonic() + 20
        while any(map(is_running, pids(tmp_path))) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(is_running, pids(tmp_path)))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for pid in filter(is_running, pids(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def pids(run):
    return [int(path.read_text()) for path in sorted(run.glob("started_*"))]


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(true):
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_extra_is_named():
    with pytest.raises(DependencyError, match=r"launcher=ray needs .* pip install 'rlmodule\[ray\]'"):
        LAUNCHERS.get("ray")().check()


@pytest.mark.parametrize("key", ["cpus_per_process", "wait"])
def test_nothing_is_set_aside_for_free(key):
    with pytest.raises(ConfigError, match=key):
        LAUNCHERS.get("ray")(**{key: 0.0})


@needs_ray
@pytest.mark.backends
@pytest.mark.ranks
def test_ranks_of_two_machines_know_their_places_and_the_first_one_is_heard(tmp_path):
    body = """
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")
    (run / f"place_{rank}").write_text(" ".join(os.environ[name] for name in names))
    print(f"rank {rank} speaks", "RLMODULE_STORE" in os.environ, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    """
    with started(tmp_path, body, processes=2, nodes=2) as process:
        said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, said
    places = [(tmp_path / f"place_{rank}").read_text() for rank in range(4)]
    assert places == ["0 0 0 4", "1 1 0 4", "2 0 1 4", "3 1 1 4"]
    assert re.search(r"^rank 0 speaks False [\d.]+ \d+$", said, re.MULTILINE), "several machines share no file"
    assert "rank 1 speaks" not in said
    assert "rank 3 speaks" in (tmp_path / "logs" / "rank_3.log").read_text()


@needs_ray
@pytest.mark.backends
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("death", "says"),
    [
        ("os.kill(os.getpid(), 9)", "error: rank 1 was ended by SIGKILL; its output is in "),
        ("enter('update'); time.sleep(1); os.kill(os.getpid(), 19)", "froze in phase 'update': no sign of life for "),
    ],
)
def test_a_rank_that_dies_or_freezes_is_named_and_takes_the_others_along(tmp_path, death, says):
    with started(tmp_path, f"if rank == 1:\n    {death}{SLEEP}") as process:
        said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == USER_ERROR, said
    assert says in said
    assert "No state was saved yet" in said


@needs_ray
@pytest.mark.backends
@pytest.mark.ranks
def test_a_scheduler_s_warning_reaches_every_rank(tmp_path):
    body = f"""
    import signal
    def note(number, frame):
        (run / f"warned_{{rank}}").write_text(signal.Signals(number).name)
        raise SystemExit({PREEMPTED})
    signal.signal(signal.SIGTERM, note)
    (run / f"ready_{{rank}}").touch()
    time.sleep(600)
    """
    with started(tmp_path, body) as process:
        wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == PREEMPTED
    assert [(tmp_path / f"warned_{rank}").read_text() for rank in range(2)] == ["SIGTERM"] * 2


@needs_ray
@pytest.mark.backends
@pytest.mark.ranks
def test_kill_9_of_the_supervisor_leaves_no_rank_behind(tmp_path):
    with started(tmp_path, SLEEP) as process:
        wait_until(lambda: len(pids(tmp_path)) == 2)
        process.kill()


def test_a_character_that_rank_0_has_half_written_is_shown_once_it_is_whole(tmp_path):
    host = RankHost()
    host.log = tmp_path / "log"
    first, second = "é".encode()[:1], "é".encode()[1:]
    host.log.write_bytes(b"caf" + first)
    said = [host.look()[2]]
    with host.log.open("ab") as log:
        log.write(second)
    assert [*said, host.look()[2]] == ["caf", "é"]
