"""A run's own server: started, watched, started again, and never left behind."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from rlmodule.rollout.parts.own_server import OwnServer, OwnServers

SLEEPER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"


def wait_until(there, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def sleeper(folder):
    """A server that does nothing, and the file that its process number is in."""
    file = folder / "pid"
    command = [sys.executable, "-I", "-c", SLEEPER, str(file)]
    clean = folder / "weights"
    clean.mkdir(exist_ok=True)
    return OwnServer(command, folder, "127.0.0.1", 1, folder / "log", clean), file


def started(folder):
    server, file = sleeper(folder)
    file.unlink(missing_ok=True)
    server.start()
    wait_until(lambda: file.exists() and file.read_text())
    return server, int(file.read_text())


def test_closing_ends_the_process(tmp_path):
    server, pid = started(tmp_path)
    assert server.is_running
    server.close()
    assert not is_alive(pid)
    assert not server.is_running
    assert not server.clean.exists(), "weights that nobody reads any more are gone"


def test_a_trainer_that_is_killed_leaves_no_server_and_no_weights(tmp_path):
    def trainer():
        started(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=trainer)
    process.start()
    process.join(60)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: not (tmp_path / "weights").exists())


def test_a_server_that_ends_is_started_again_as_often_as_was_said(tmp_path):
    server, file = sleeper(tmp_path)
    servers = OwnServers((server,), restarts=1)
    servers.start()
    wait_until(lambda: file.exists() and file.read_text())
    first = int(file.read_text())
    assert servers.has_ended(server.url) is False
    servers.watch()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: file.read_text() not in ("", str(first)))
    os.kill(int(file.read_text()), signal.SIGKILL)
    wait_until(lambda: servers.has_ended(server.url))
    assert "the server ended with code -9" in server.last_words()
    servers.close()


def test_a_server_that_is_ended_leaves_its_weights_and_is_started_again(tmp_path):
    server, file = sleeper(tmp_path)
    servers = OwnServers((server,), restarts=1)
    servers.start()
    wait_until(lambda: file.exists() and file.read_text())
    first = int(file.read_text())
    servers.watch()
    servers.end("http://127.0.0.1:2")
    assert is_alive(first), "another address"
    servers.end(server.url)
    assert not is_alive(first)
    wait_until(lambda: file.read_text() not in ("", str(first)))
    assert server.clean.exists()
    servers.close()
    assert not server.clean.exists()
