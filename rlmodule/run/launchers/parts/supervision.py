"""Watches the ranks of a run: ends them all when one dies, says which one it was, and passes signals on.

The supervisor is no rank itself. It hands the ranks the finished configuration, so a run is composed once, writes into
one directory, and a sweep of many runs leaves nothing behind between them. A rank is whatever answers like a child
process, wherever it runs. Leaves out how ranks are started (the launchers beside ``parts/``) and everything that needs
torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlmodule.core.errors import TrainingError
from rlmodule.run.launchers.parts.heartbeat import beat, file_of
from rlmodule.run.launchers.parts.place import HEARTBEATS, SUPERVISOR, process_rank, without_place

WORKER_FLAG = "--worker"
WARM_START_FLAG = "--warm-start"
USER_ERROR = 2  # exit code for errors of the user's making
DIFFERENT_NUMBERS = 1  # exit code of command=parity when a layout does not give the numbers of one process
BUG = 1  # exit code of a bug of ours, which keeps its traceback
LOST_PEERS = 76  # exit code of a rank that could not go on because another one was gone
PREEMPTED = 75  # exit code of a run that was asked to stop and has saved its state (EX_TEMPFAIL: try again later)
_GRACE_SECONDS = 20.0
_POLL_SECONDS = 0.05
_CTRL_C_SECONDS = 5.0  # that ranks get to end by themselves
_REPEAT_SECONDS = 5.0  # a signal that comes again within this time is the same request


class Rank(Protocol):
    """What is asked of the process of a rank: the part of ``subprocess.Popen`` that the supervisor uses."""

    @property
    def returncode(self) -> int | None:
        """Exit code as it was last seen, the negative number of a signal that ended it; None while it runs."""

    def poll(self) -> int | None:
        """Look; returns ``returncode``."""

    def send_signal(self, number: int, /) -> None:
        """Pass a signal on."""

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, after that many seconds.
        """

    def kill(self) -> None:
        """End it at once."""


class _Insisted(KeyboardInterrupt):
    """A scheduler's signal that came again: end at once."""


@dataclass
class Ranks:
    """The ranks of one run.

    Args:
        run_dir: of the run.
        processes: by rank.
        failed: ranks that did not end well, in the order in which that was seen.
    """

    run_dir: Path
    processes: list[Rank] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def log(self, rank: int) -> Path:
        """Where a rank that does not speak to the terminal writes."""
        return self.run_dir / "logs" / f"rank_{rank}.log"

    def codes(self) -> list[int | None]:
        """Exit code of each, None while it runs."""
        codes = [process.poll() for process in self.processes]
        new = [rank for rank, code in enumerate(codes) if code not in (None, 0) and rank not in self.failed]
        self.failed += sorted(new, key=lambda rank: (codes[rank] or 0) > 0)  # a signal is a cause sooner than an error
        return codes

    @property
    def cause(self) -> int | None:
        """The rank that failed by itself: one that a signal ended, or else the first with an error of its own."""
        codes = {rank: self.processes[rank].returncode for rank in self.failed}
        own = [rank for rank, code in codes.items() if code != LOST_PEERS]
        return next((rank for rank in own if (codes[rank] or 0) < 0), own[0] if own else None)

    def signal(self, number: int) -> None:
        """Pass a signal on to those that run."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Until all have ended, or for that long."""
        deadline = time.monotonic() + seconds
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """End those that run: kindly, and after a while by force."""
        self.signal(signal.SIGCONT)  # a frozen process hears nothing else
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def lost_peers(error: BaseException) -> bool:
    """Whether an error of torch's collectives says that another rank is gone."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return "gloo" in str(error).lower() and any(word in str(error) for word in words)


def supervise(ranks: Ranks, start: Callable[[Ranks], Callable[[], str | None]]) -> int:
    """Start the ranks of a run and see them to their end.

    Args:
        ranks: none yet.
        start: appends each as it starts it; returns what says, in words, that one has been silent for too long.

    Returns:
        The exit code of the rank that failed first by itself, or 0.

    Raises:
        TrainingError: a rank died of a signal or froze; the message names it.
    """
    (ranks.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with _signals_passed_on(ranks):
        try:
            return _wait(ranks, start(ranks))
        except KeyboardInterrupt as error:
            if not isinstance(error, _Insisted):
                ranks.wait(_CTRL_C_SECONDS)  # Ctrl-C reached them as well, and they write what they can
            raise
        finally:
            ranks.end()


def run_alone(program: Sequence[str], run_dir: Path) -> None:
    """Make the starting weights in a process of its own, which does not know that it has peers.

    Raises:
        TrainingError: it did not end well.
    """
    command = [sys.executable, *program, WARM_START_FLAG, str(run_dir)]
    code = subprocess.run(command, env=without_place(os.environ)).returncode
    if code:
        raise TrainingError(f"the warm start exited with code {code}; what it said is above")


def _wait(ranks: Ranks, silent: Callable[[], str | None]) -> int:
    """Until all have ended well, or the first has not."""
    while True:
        codes = ranks.codes()
        if any(code not in (None, 0) for code in codes):
            return _explain(ranks)
        if all(code == 0 for code in codes):
            return 0
        words = silent()
        if words is not None:
            ranks.signal(signal.SIGKILL)
            raise TrainingError(f"{words}. All ranks were ended. {_last_state(ranks.run_dir)}")
        time.sleep(_POLL_SECONDS)


def _explain(ranks: Ranks) -> int:
    """The exit code of the rank that is the cause, once it is known which one that is.

    An error of the user's is found by every rank alike, and a rank that was asked to stop may have to wait for its
    peers: rank 0 says it. Ranks whose connection broke are consequences.
    """
    is_stopping = PREEMPTED in ranks.codes()
    if is_stopping:
        ranks.signal(signal.SIGTERM)
    deadline = time.monotonic() + (_GRACE_SECONDS if is_stopping else 3.0)
    while None in ranks.codes() and time.monotonic() < deadline and (is_stopping or ranks.cause is None):
        time.sleep(_POLL_SECONDS)
    if is_stopping:
        return PREEMPTED
    if ranks.processes[0].poll() is None and ranks.cause and ranks.codes()[ranks.cause] == USER_ERROR:
        time.sleep(2.0)  # rank 0 finds the same, and says it before it is ended
    rank = ranks.failed[0] if ranks.cause is None else ranks.cause
    code, log = ranks.processes[rank].returncode or 0, ranks.log(rank)
    told = f"its output is in {log}. The other ranks were stopped. {_last_state(ranks.run_dir)}"
    if code == BUG and rank:
        print(f"{last_traceback(log)}\nrank {rank} failed; {told}", file=sys.stderr, flush=True)
    if code in (USER_ERROR, BUG) or (rank == 0 and code > 0 and code != LOST_PEERS):
        return code  # rank 0 has said why
    if code == LOST_PEERS:
        raise TrainingError(f"the ranks lost their connection to each other; {told}")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    raise TrainingError(f"rank {rank} {how}" + (f"; {told}" if rank else f". {told.partition('. ')[2]}"))


def last_traceback(log: Path) -> str:
    """The last traceback in a log file, or its last lines where there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return "\n".join(lines[starts[-1] :] if starts else lines[-20:])


def _last_state(run_dir: Path) -> str:
    """What to go on from."""
    there = (path.name for path in (run_dir / "checkpoints").glob("iteration_*"))
    saved = sorted(name for name in there if re.fullmatch(r"iteration_\d+(\.step_\d+)?", name))
    return f"Go on from {saved[-1]} with resume={run_dir}" if saved else "No state was saved yet"


@contextmanager
def _signals_passed_on(ranks: Ranks) -> Iterator[None]:
    """SIGTERM and SIGUSR1 (a scheduler's warnings) reach the ranks, which save and stop; a later one ends them.

    Ctrl-C reaches them by itself.
    """
    first_at: float | None = None

    def pass_on(number: int, _frame: object) -> None:
        nonlocal first_at
        now = time.monotonic()
        if first_at is None:
            first_at = now
            ranks.signal(number)
        elif now - first_at > _REPEAT_SECONDS:
            raise _Insisted

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_supervisor() -> Callable[[str], None]:
    """In a rank: give signs of life, and leave when the supervisor is gone, so that kill -9 of it leaves nothing
    behind.

    Returns:
        What to call with each phase that begins.
    """
    supervisor = int(os.environ.get(SUPERVISOR, "0"))
    if not supervisor:
        return lambda phase: None

    def watch() -> None:
        while os.getppid() == supervisor:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="supervisor-watch").start()
    if HEARTBEATS not in os.environ:
        return lambda phase: None
    return beat(file_of(Path(os.environ[HEARTBEATS]), process_rank()))
