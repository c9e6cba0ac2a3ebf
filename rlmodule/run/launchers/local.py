"""Several processes on one machine: a supervisor starts the ranks, watches them, and ends them all when one dies.

The supervisor is no rank itself. It hands the ranks the finished configuration, so a run is composed once, writes into
one directory, and a sweep of many runs leaves nothing behind between them. The ranks find each other through a file
that they alone can read, so no port is opened. On several machines torchrun or srun does this job. Leaves out
everything that needs torch.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlmodule.core.errors import TrainingError
from rlmodule.run.launchers.heartbeat import Heartbeats, beat, file_of

WORKER_FLAG = "--worker"
WARM_START_FLAG = "--warm-start"
STORE = "RLMODULE_STORE"  # the file through which the ranks of one machine meet
USER_ERROR = 2  # exit code for errors of the user's making
DIFFERENT_NUMBERS = 1  # exit code of command=parity when a layout does not give the numbers of one process
BUG = 1  # exit code of a bug of ours, which keeps its traceback
LOST_PEERS = 76  # exit code of a rank that could not go on because another one was gone
PREEMPTED = 75  # exit code of a run that was asked to stop and has saved its state (EX_TEMPFAIL: try again later)
_GRACE_SECONDS = 20.0
_POLL_SECONDS = 0.05
_CTRL_C_SECONDS = 5.0  # that ranks get to end by themselves
_REPEAT_SECONDS = 5.0  # a signal that comes again within this time is the same request


def launched_from_outside() -> bool:
    """Whether torchrun or srun started this process as one of several."""
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return True
    return (
        int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ and "SLURM_STEP_ID" in os.environ
    )


def outside_rank() -> int:
    """This process's rank as torchrun or srun gave it; 0 without them."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) if launched_from_outside() else 0


def process_rank() -> int:
    """This process's rank in the run, as whoever started it said; 0 for a process alone."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0"))))


class _Insisted(KeyboardInterrupt):
    """A scheduler's signal that came again: end at once."""


@dataclass
class Ranks:
    """The ranks of one run on this machine.

    Args:
        run_dir: of the run.
        processes: by rank.
        failed: ranks that did not end well, in the order in which that was seen.
    """

    run_dir: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def log(self, rank: int) -> Path:
        """Where a rank that does not speak to the terminal writes."""
        return self.run_dir / "logs" / f"rank_{rank}.log"

    def start(self, program: Sequence[str], num_processes: int, store: Path) -> None:
        """Start them all; rank 0 speaks to the terminal."""
        for rank in range(num_processes):
            command = [sys.executable, *program, WORKER_FLAG, str(self.run_dir)]
            environment = {**os.environ, **_place(rank, num_processes), STORE: str(store)}
            if rank == 0:
                self.processes.append(subprocess.Popen(command, env=environment))
                continue
            with self.log(rank).open("ab") as log:
                self.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))

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
        return next((rank for rank in own if codes[rank] < 0), own[0] if own else None)

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


def supervise(program: Sequence[str], run_dir: Path, num_processes: int, timeout: float = 600.0) -> int:
    """Run ``python PROGRAM --worker run_dir`` as ``num_processes`` ranks.

    Args:
        program: arguments of the interpreter that start this package.
        run_dir: of the run; its configuration is there already.
        num_processes: ranks.
        timeout: seconds that a rank may be silent before it counts as frozen.

    Returns:
        The exit code of the rank that failed first by itself, or 0.

    Raises:
        TrainingError: a rank died of a signal or froze; the message names it.
    """
    ranks = Ranks(run_dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    meeting = Path(tempfile.mkdtemp(prefix="rlmodule-"))
    with _signals_passed_on(ranks):
        try:
            ranks.start(program, num_processes, meeting / "store")
            return _wait(ranks, Heartbeats(meeting, num_processes, timeout))
        except KeyboardInterrupt as error:
            if not isinstance(error, _Insisted):
                ranks.wait(_CTRL_C_SECONDS)  # Ctrl-C reached them as well, and they write what they can
            raise
        finally:
            ranks.end()
            shutil.rmtree(meeting, ignore_errors=True)


def run_alone(program: Sequence[str], run_dir: Path) -> None:
    """Make the starting weights in a process of its own, which does not know that it has peers.

    Raises:
        TrainingError: it did not end well.
    """
    ranks = (STORE, "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_", "NODE_RANK")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ranks)}
    code = subprocess.run([sys.executable, *program, WARM_START_FLAG, str(run_dir)], env=environment).returncode
    if code:
        raise TrainingError(f"the warm start exited with code {code}; what it said is above")


def _place(rank: int, num_processes: int) -> dict[str, str]:
    """Environment that tells a rank where it is; Lightning reads most of it."""
    return {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "RLMODULE_SUPERVISOR": str(os.getpid()),
        # What ranks of one machine say to each other is for no other machine.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }


def _wait(ranks: Ranks, heartbeats: Heartbeats) -> int:
    """Until all have ended well, or the first has not."""
    while True:
        codes = ranks.codes()
        if any(code not in (None, 0) for code in codes):
            return _explain(ranks)
        if all(code == 0 for code in codes):
            return 0
        silent = heartbeats.silent()
        if silent is not None:
            ranks.signal(signal.SIGKILL)
            raise TrainingError(f"{silent}. All ranks were ended. {_last_state(ranks.run_dir)}")
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
    code, log = int(ranks.processes[rank].returncode), ranks.log(rank)
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
    supervisor = int(os.environ.get("RLMODULE_SUPERVISOR", "0"))
    if not supervisor:
        return lambda phase: None

    def watch() -> None:
        while os.getppid() == supervisor:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="supervisor-watch").start()
    if STORE not in os.environ:
        return lambda phase: None
    return beat(file_of(Path(os.environ[STORE]).parent, process_rank()))
