"""Several processes on one machine: a supervisor starts the ranks, watches them, and ends them all when one dies.

The supervisor is no rank itself. It hands the ranks the finished configuration, so a run is composed once, writes into
one directory, and a sweep of many runs leaves nothing behind between them. On several machines torchrun or srun does
this job. Leaves out everything that needs torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlmodule.core.errors import TrainingError

WORKER_FLAG = "--worker"
WARM_START_FLAG = "--warm-start"
USER_ERROR = 2  # exit code for errors of the user's making
DIFFERENT_NUMBERS = 1  # exit code of command=parity when a layout does not give the numbers of one process
PREEMPTED = 75  # exit code of a run that was asked to stop and has saved its state (EX_TEMPFAIL: try again later)
_GRACE_SECONDS = 20.0
_POLL_SECONDS = 0.05


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


def supervise(program: Sequence[str], run_dir: Path, num_processes: int) -> int:
    """Run ``python PROGRAM --worker run_dir`` as ``num_processes`` ranks.

    Returns the exit code of the first that failed, or 0. Rank 0 speaks to the terminal, the others write
    ``run_dir/logs/rank_N.log``.

    Raises:
        TrainingError: a rank died of a signal; the message names it and its log.
    """
    port = free_port()
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    with _signals_passed_on(ranks):
        try:
            for rank in range(num_processes):
                ranks.append(_start(program, run_dir, rank, num_processes, port, logs))
            return _wait(ranks, logs)
        finally:
            _end(ranks)


def run_alone(program: Sequence[str], run_dir: Path) -> None:
    """Make the starting weights in a process of its own, which does not know that it has peers.

    Raises:
        TrainingError: it did not end well.
    """
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_", "NODE_RANK")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ranks)}
    code = subprocess.run([sys.executable, *program, WARM_START_FLAG, str(run_dir)], env=environment).returncode
    if code:
        raise TrainingError(f"the warm start exited with code {code}; what it said is above")


def _start(
    program: Sequence[str], run_dir: Path, rank: int, num_processes: int, port: int, logs: Path
) -> subprocess.Popen[bytes]:
    place = {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, *program, WORKER_FLAG, str(run_dir)]
    environment = {**os.environ, **place, "RLMODULE_SUPERVISOR": str(os.getpid())}
    if rank == 0:
        return subprocess.Popen(command, env=environment)
    with (logs / f"rank_{rank}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], logs: Path) -> int:
    """Until all have ended well, or the first has not."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            return _explain(failed, ranks, logs)
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_SECONDS)


def _explain(failed: Sequence[int], ranks: Sequence[subprocess.Popen[bytes]], logs: Path) -> int:
    # An error of the user's is found by every rank alike; let rank 0 say it before its peers are ended.
    codes = {ranks[rank].returncode for rank in failed}
    deadline = time.monotonic() + (_GRACE_SECONDS if PREEMPTED in codes else 2.0)
    while ranks[0].poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if ranks[0].returncode in (USER_ERROR, PREEMPTED):
        return int(ranks[0].returncode)
    # A rank that a signal ended is the cause; its peers fail because they have lost their connection to it, and may be
    # seen to fail first.
    time.sleep(_POLL_SECONDS)
    rank = next((rank for rank, process in enumerate(ranks) if (process.poll() or 0) < 0), failed[0])
    code = int(ranks[rank].returncode)
    if rank == 0 and code > 0:
        return code  # it has said why
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    log = "" if rank == 0 else f"; its output is in {logs / f'rank_{rank}.log'}"
    raise TrainingError(f"rank {rank} {how}{log}. The other ranks were stopped. Go on with resume=auto")


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        rank.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for rank in running:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


@contextmanager
def _signals_passed_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """SIGTERM and SIGUSR1 (a scheduler's warnings) reach the ranks, which save and stop; a second one ends them.

    Ctrl-C reaches them by itself.
    """
    warned = False

    def pass_on(number: int, _frame: object) -> None:
        nonlocal warned
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)
        if warned:
            raise KeyboardInterrupt
        warned = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_supervisor() -> None:
    """In a rank: leave when the supervisor is gone, so that kill -9 of it leaves no process behind."""
    supervisor = int(os.environ.get("RLMODULE_SUPERVISOR", "0"))
    if not supervisor:
        return

    def watch() -> None:
        while os.getppid() == supervisor:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="supervisor-watch").start()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
