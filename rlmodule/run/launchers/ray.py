"""``launcher=ray``: ranks on the machines of a Ray cluster; an actor on each starts them as its child processes.

So a rank is the same process as under every launcher, and ends in the same words. Ray's own trainer is not used: it
makes process groups of its own. Leaves out how ranks are watched (``parts/supervision.py``).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from rlmodule.core.config import more_than
from rlmodule.core.errors import DependencyError, TrainingError, in_one_line
from rlmodule.run.launchers import LAUNCHERS, Job
from rlmodule.run.launchers.local import meeting_in
from rlmodule.run.launchers.parts.heartbeat import Heartbeats
from rlmodule.run.launchers.parts.place import HEARTBEATS, ProcessPlace
from rlmodule.run.launchers.parts.supervision import WORKER_FLAG, Ranks, supervise
from rlmodule.run.launchers.parts.waiting import WaitingRank

RESOURCES = {"cuda": "GPU", "xpu": "GPU", "npu": "NPU"}  # Ray's names of devices; a CPU is no device of its own
ANSWER_SECONDS = 30.0  # that a busy machine may take to say how its ranks are
LOOK_SECONDS = 0.05  # between two questions to a machine
STARTS = 3  # attempts to start a cluster, or to connect to one
SMALLEST_STORE = 80 * 2**20  # bytes; nothing is kept in Ray's object store


@LAUNCHERS.register
@dataclass(frozen=True)
class RayLauncher:
    """Where the cluster is, and what Ray sets aside for a rank."""

    reaches_other_machines: ClassVar[bool] = True

    address: str | None = None  # of a cluster's head: HOST:PORT, or auto; null for RAY_ADDRESS, or a cluster of our own
    cpus_per_process: float = 1.0  # CPU cores that Ray sets aside for each rank
    wait: float = 600.0  # seconds that the cluster may take to have room for all ranks

    def __post_init__(self) -> None:
        more_than("cpus_per_process", self.cpus_per_process, 0)
        more_than("wait", self.wait, 0)

    def check(self) -> None:
        """Refuse a run that cannot be started.

        Raises:
            DependencyError: Ray is not installed.
        """
        if find_spec("ray") is None:
            raise DependencyError(package="ray", needed_by="launcher=ray", extra="ray")

    def ready(self, num_processes: int, device: str, main: Callable[[Sequence[str]], int]) -> Sequence[WaitingRank]:
        """None: the ranks' machines are not known yet."""
        return ()

    def __call__(self, job: Job) -> int:
        """Start and watch the ranks; what rank 0 says is shown here."""
        import ray

        with self._cluster(ray, job), self._machines(ray, job) as machines:
            try:
                return supervise(Ranks(job.run_dir), partial(_start, job, machines))
            finally:
                for machine in machines:
                    machine.look(at_once=True)  # rank 0's last words; an actor clears up when all have ended

    @contextmanager
    def _cluster(self, ray: Any, job: Job) -> Iterator[None]:
        """Connected to the cluster; one of our own is gone afterwards, with everything that it wrote."""
        folder = None
        options: dict[str, Any] = {"address": self.address}
        if self.address is None and "RAY_ADDRESS" not in os.environ:
            folder = tempfile.mkdtemp(prefix="rlmodule-ray-")
            # It would kill ranks once the machine is short of memory, whoever uses it.
            os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anyone
            cores = max(os.cpu_count() or 1, int(job.world_size * self.cpus_per_process + 1))
            options = {"num_cpus": cores, "object_store_memory": SMALLEST_STORE, "_temp_dir": folder}
            options["include_dashboard"] = False
        try:
            with _handlers_kept():
                _connect(ray, options)
            yield
        finally:
            ray.shutdown()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _machines(self, ray: Any, job: Job) -> Iterator[list[RayMachine]]:
        """An actor on each machine, with room for its ranks.

        Raises:
            TrainingError: the cluster has no room for them.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": self.cpus_per_process * job.num_processes}
        if job.device in RESOURCES:
            bundle[RESOURCES[job.device]] = float(job.num_processes)
        group = ray.util.placement_group([bundle] * job.num_nodes, strategy="SPREAD")
        try:
            ray.get(group.ready(), timeout=self.wait)
            actors = [
                ray.remote(RankHost)
                .options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    resources={name: number for name, number in bundle.items() if name not in ("CPU", "GPU")},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                )
                .remote()
                for index in range(job.num_nodes)
            ]
            yield [RayMachine(ray, actor, job.num_processes) for actor in actors]
        except ray.exceptions.GetTimeoutError as error:
            raise TrainingError(
                f"the Ray cluster had no room for {job.num_nodes} x {bundle} within launcher.wait={self.wait:g} "
                f"seconds; it has {ray.cluster_resources()}"
            ) from error
        finally:
            ray.util.remove_placement_group(group)


def _connect(ray: Any, options: Mapping[str, Any]) -> None:
    """Connect; Ray gives its own processes half a minute to start, which a busy machine may exceed.

    Raises:
        TrainingError: it never came to it.
    """
    for attempt in range(STARTS):
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
            return
        except Exception as error:  # Ray raises all kinds
            ray.shutdown()
            if attempt == STARTS - 1:
                where = options.get("address") or os.environ.get("RAY_ADDRESS", "this machine")
                raise TrainingError(f"launcher.address: no Ray cluster on {where} ({in_one_line(error)})") from error


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put back the handlers of signals that are replaced inside, as Ray does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(job: Job, machines: list[RayMachine], ranks: Ranks) -> Callable[[], str | None]:
    address, port = machines[0].meeting_point()
    # One machine meets through a file of its own; several cannot.
    meeting = {} if job.num_nodes == 1 else {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    for node_rank, machine in enumerate(machines):
        machine.start(job, node_rank, meeting)
        ranks.processes += [RayRank(machine, local_rank) for local_rank in range(job.num_processes)]
    return lambda: next((machine.silent for machine in machines if machine.silent), None)


class RankHost:
    """The ranks of one machine, where they are; Ray makes an actor of it."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folder = Path(tempfile.mkdtemp(prefix="rlmodule-"))
        self.log, self.told = Path(os.devnull), 0
        self.text = getincrementaldecoder("utf-8")("replace")  # keeps a character of which only a part was written
        self.heartbeats = Heartbeats(self.folder, (), 0.0)  # of no rank, until they are started

    def meeting_point(self) -> tuple[str, int]:
        """Address at which the cluster knows this machine, and a port of it that is free."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(free.getsockname()[1])

    def start(self, job: Job, node_rank: int, meeting: Mapping[str, str], there: Mapping[str, str]) -> None:
        """Start them all; ``there`` is the environment of the supervisor, for what this machine's lacks."""
        ours = {name: value for name, value in there.items() if name.startswith("RLMODULE_")}
        shared = {**there, **os.environ, **ours, "PYTHONUNBUFFERED": "1", HEARTBEATS: str(self.folder)}
        first = node_rank * job.num_processes
        (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        for rank in range(first, first + job.num_processes):
            place = ProcessPlace.of_rank(rank, job.num_processes, job.num_nodes).variables(os.getpid())
            log = Ranks(job.run_dir).log(rank)
            if rank == 0:
                self.log, self.told = log, log.stat().st_size if log.exists() else 0
            with log.open("ab") as out:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *job.program, WORKER_FLAG, str(job.run_dir)],
                        env={**shared, **place, **(meeting or meeting_in(self.folder))},
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
        self.heartbeats = Heartbeats(self.folder, range(first, first + job.num_processes), job.timeout)

    def look(self) -> tuple[list[int | None], str | None, str]:
        """Exit codes, words for a rank that is silent, and what rank 0 has said since the last time."""
        codes = [process.poll() for process in self.processes]
        with self.log.open("rb") as log:
            log.seek(self.told)
            said = log.read()
        self.told += len(said)
        if None not in codes:
            shutil.rmtree(self.folder, ignore_errors=True)
        return codes, self.heartbeats.silent(), self.text.decode(said)

    def signal(self, local_rank: int, number: int) -> None:
        """Pass a signal on."""
        self.processes[local_rank].send_signal(number)


class RayMachine:
    """A machine's actor, seen from the supervisor: one question for all of its ranks.

    Args:
        ray: the package.
        actor: handle of a ``RankHost``.
        num_ranks: that it starts.
    """

    def __init__(self, ray: Any, actor: Any, num_ranks: int) -> None:
        self.ray, self.actor = ray, actor
        self.codes: list[int | None] = [None] * num_ranks
        self.silent: str | None = None
        self._looked_at = 0.0

    def meeting_point(self) -> tuple[str, int]:
        """Address and free port of this machine."""
        address, port = self.ray.get(self.actor.meeting_point.remote())
        return str(address), int(port)

    def start(self, job: Job, node_rank: int, meeting: Mapping[str, str]) -> None:
        """Start the machine's ranks."""
        self.ray.get(self.actor.start.remote(job, node_rank, meeting, dict(os.environ)))

    def look(self, *, at_once: bool = False) -> None:
        """See how its ranks are; a machine whose actor is gone has lost them all."""
        if not at_once and time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        try:
            answer = self.ray.get(self.actor.look.remote(), timeout=ANSWER_SECONDS)
        except self.ray.exceptions.GetTimeoutError:  # it is asked again once its other ranks have had their turn
            self._looked_at = time.monotonic() + ANSWER_SECONDS
            return
        except self.ray.exceptions.RayActorError:
            self.codes = [-signal.SIGKILL if code is None else code for code in self.codes]
            return
        self._looked_at = time.monotonic()
        self.codes, self.silent, said = answer
        print(said, end="", flush=True)


class RayRank:
    """A rank that looks like a child process.

    Args:
        machine: where it is.
        local_rank: its number there.
    """

    def __init__(self, machine: RayMachine, local_rank: int) -> None:
        self.machine, self.local_rank = machine, local_rank

    @property
    def returncode(self) -> int | None:
        """Exit code as it was last seen; None while it runs."""
        return self.machine.codes[self.local_rank]

    def poll(self) -> int | None:
        """Look; returns ``returncode``."""
        if self.returncode is None:
            self.machine.look()
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        """Pass a signal on; nothing is awaited, since this is called while a signal is handled."""
        self.machine.actor.signal.remote(self.local_rank, number)

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, after that many seconds.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(LOOK_SECONDS)
        return code

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)
