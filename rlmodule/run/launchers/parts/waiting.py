"""Ranks that are there before their run is checked: forks of the supervisor, which wait to be told who they are.

A fork has what its supervisor has imported, so the seconds of CPU time that imports take are spent once per machine and
not once per rank, and the ranks share that memory. A fork of a process that has more threads than its imports started
may hang, and devices other than CPUs cannot be used in one, so ranks are then started as new interpreters. Linux only.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlmodule.core.interpreter import forget_exit_functions, run_to_the_end

INTERRUPTED = 130
_POLL_SECONDS = 0.01


class WaitingRank:
    """A fork of this process; a ``Rank`` (``supervision.py``) from the beginning, also while it waits.

    Args:
        main: what it does once it is told its arguments; returns the exit code.

    Raises:
        OSError: the system lets this process have no fork.
    """

    def __init__(self, main: Callable[[Sequence[str]], int]) -> None:
        self.returncode: int | None = None
        read, self._write = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else what waits to be written is written twice
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 of threads that allocators and BLAS own
            try:
                self.pid = os.fork()
            except OSError:
                os.close(read)
                os.close(self._write)
                raise
        if not self.pid:
            os.close(self._write)
            run_to_the_end(lambda: _wait(read, main))
        os.close(read)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        """Let it begin; one that has died meanwhile is left as it is, and ``poll`` says so.

        Args:
            arguments: of the command line.
            environment: all of it.
            log: the file that its output goes to; None keeps this process's.
        """
        write, self._write = self._write, -1
        with suppress(BrokenPipeError), open(write, "wb") as pipe:
            pickle.dump((list(arguments), dict(environment), log), pipe)

    def dismiss(self) -> None:
        """It is not needed; does nothing where it has been started."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1
            self.kill()
            self.wait()

    def poll(self) -> int | None:
        """Look whether it has ended; returns ``returncode``."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, after that many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Pass a signal on, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _wait(read: int, main: Callable[[Sequence[str]], int]) -> int:
    """In the fork."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    forget_exit_functions()
    try:
        with open(read, "rb") as pipe:
            arguments, environment, log = pickle.load(pipe)
    except (EOFError, KeyboardInterrupt):  # the supervisor is gone, or the run was interrupted
        return INTERRUPTED
    os.environ.clear()
    os.environ.update(environment)
    if log is not None:
        _write_to(log)
    _show_name(f"rank {environment['RANK']}")
    return main(arguments)


def _write_to(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _show_name(name: str) -> None:
    """What ps and top call this process."""
    with suppress(OSError):  # some sandboxes forbid it
        Path("/proc/self/comm").write_text(name)
