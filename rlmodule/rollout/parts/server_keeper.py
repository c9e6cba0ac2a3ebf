"""Runs a server for a trainer and ends with it, also when the trainer is killed.

``python server_keeper.py CLEAN COMMAND...`` is a process of its own, which loads nothing but the standard library. Its
standard input is a pipe from the trainer. When that closes, or when its parent is gone, the folder CLEAN is removed and
every process of its group ended; a byte on it ends them and leaves the folder; when the server ends first, what it has
left of the group is ended. Standard output and error are those it was given, the server's too.
"""

from __future__ import annotations

import ctypes
import glob
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.2
PATIENCE_SECONDS = 20.0  # for processes that were asked to end; shared memory of those that are killed stays behind


def main(arguments: Sequence[str]) -> int:
    """Run the server until one of the two ends."""
    clean, *command = arguments
    parent = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the whole group below
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    told: bytes | None = None
    while server.poll() is None and os.getppid() == parent and told is None:
        told = _read(0)
    if server.poll() is None and not told:
        shutil.rmtree(clean, ignore_errors=True)
    else:
        print(f"the server ended with code {server.returncode}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (server.poll() is None or _has_others()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 4)
    os.killpg(0, signal.SIGKILL)
    return 1


def _read(stream: int) -> bytes | None:
    """A byte from a pipe, none at its end; None where nothing comes within a moment."""
    ready, _, _ = select.select([stream], [], [], POLL_SECONDS)
    return os.read(stream, 1) if ready else None


def _has_others() -> bool:
    """Whether a process of this group lives beside this one; where the system says so."""
    mine, group = str(os.getpid()), str(os.getpgrp())
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as file:
                pid, _, rest = file.read().partition(" ")
        except OSError:  # it has just ended
            continue
        state, _, of_group = rest.rpartition(")")[2].split()[:3]
        if of_group == group and pid != mine and state != "Z":
            return True
    return False


def _die_with_parent() -> None:
    """In the server: end when the keeper does, however that happens; where the system can."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
