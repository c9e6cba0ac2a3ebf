"""``launcher=local``: the ranks of one machine, as child processes of this one.

They find each other through a file that they alone can read, so no port is opened. Leaves out how they are watched
(``parts/supervision.py``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from rlmodule.core.interpreter import can_fork
from rlmodule.run.launchers import LAUNCHERS, Job
from rlmodule.run.launchers.parts.heartbeat import Heartbeats
from rlmodule.run.launchers.parts.place import HEARTBEATS, STORE, ProcessPlace
from rlmodule.run.launchers.parts.supervision import WORKER_FLAG, Rank, Ranks, supervise
from rlmodule.run.launchers.parts.waiting import WaitingRank


@LAUNCHERS.register
@dataclass(frozen=True)
class Local:
    """Starts a process for each rank of this machine."""

    reaches_other_machines: ClassVar[bool] = False

    def check(self) -> None:
        """Nothing: every machine can start processes."""

    def ready(self, num_processes: int, device: str, main: Callable[[Sequence[str]], int]) -> Sequence[WaitingRank]:
        """Forks of this process, where it can be forked and their device can be used in a fork."""
        ranks: list[WaitingRank] = []
        if device == "cpu" and can_fork():
            try:
                ranks.extend(WaitingRank(main) for _ in range(num_processes))
            except OSError:  # no memory for as many forks, and new interpreters need none of this process's
                for rank in ranks:
                    rank.dismiss()
                return ()
        return ranks

    def __call__(self, job: Job) -> int:
        """Start and watch them; rank 0 speaks to the terminal."""
        meeting = Path(tempfile.mkdtemp(prefix="rlmodule-"))
        try:
            return supervise(Ranks(job.run_dir), partial(self._start, job, meeting))
        finally:
            shutil.rmtree(meeting, ignore_errors=True)

    def _start(self, job: Job, meeting: Path, ranks: Ranks) -> Callable[[], str | None]:
        for rank in range(job.num_processes):
            place = ProcessPlace.of_rank(rank, job.num_processes, 1)
            environment = {**os.environ, **place.variables(os.getpid()), **meeting_in(meeting)}
            arguments = [WORKER_FLAG, str(job.run_dir)]
            log = ranks.log(rank) if rank else None
            if job.waiting:
                job.waiting[rank].start(arguments, environment, log)
                ranks.processes.append(job.waiting[rank])
            else:
                ranks.processes.append(_interpreter([sys.executable, *job.program, *arguments], environment, log))
        return Heartbeats(meeting, range(job.num_processes), job.timeout).silent


def _interpreter(command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> Rank:
    if log is None:
        return subprocess.Popen(command, env=environment)
    with log.open("ab") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def meeting_in(folder: Path) -> dict[str, str]:
    """Variables that let the ranks of one machine meet, and give signs of life, in a folder of their own."""
    return {
        STORE: str(folder / "store"),
        HEARTBEATS: str(folder),
        "MASTER_ADDR": "127.0.0.1",
        # What ranks of one machine say to each other is for no other machine.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }
