"""Joins the ranks of a run before weights are loaded, and tells Lightning which of them this process is.

Leaves out who starts them (``run/launchers/``, torchrun, srun, a cluster's operator).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from rlmodule.core.devices import support_of
from rlmodule.core.errors import ConfigError, RLModuleError
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.build.machine import Machine
from rlmodule.run.launchers.parts.place import (
    STORE,
    ProcessPlace,
    check_meeting_point,
    launched_from_outside,
    place_of_process,
    started_by_launcher,
)

_COLLECTIVE_SECONDS = 1800.0  # torch's own limit for gloo


class KnownPlace(ClusterEnvironment):
    """What Lightning asks of a cluster, for a process whose place is known.

    Without it Lightning guesses, and takes the variables of a batch job for those of the ranks that run inside of it.

    Args:
        place: where the process is.
    """

    def __init__(self, place: ProcessPlace) -> None:
        super().__init__()
        self.place = place

    @property
    def creates_processes_externally(self) -> bool:
        """Yes: Lightning starts none."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0; the ranks have met when Lightning asks."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port of rank 0, likewise."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """No: it is given, not found."""
        return False

    def world_size(self) -> int:
        """Processes of the run."""
        return self.place.world_size

    def set_world_size(self, size: int) -> None:
        """It is known."""

    def global_rank(self) -> int:
        """Of all processes."""
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        """It is known."""

    def local_rank(self) -> int:
        """On this machine."""
        return self.place.local_rank

    def node_rank(self) -> int:
        """Of this machine."""
        return self.place.node_rank


def cluster_of(machine: Machine) -> ClusterEnvironment:
    """What Lightning's trainer is told of the processes of a run."""
    if started_by_launcher() or launched_from_outside():
        return KnownPlace(place_of_process(machine.num_processes, machine.trainer.num_nodes))
    return LightningEnvironment()


def init_distributed(machine: Machine, run_dir: RunDirectory, *, alone_is_enough: bool = False) -> RunDirectory:
    """Meet the other ranks, if there are any yet.

    Args:
        machine: where the run happens.
        run_dir: this process's.
        alone_is_enough: whether one process on one machine can start the ranks of all machines.

    Returns:
        The run directory, which is the first rank's.

    Raises:
        ConfigError: there are more or fewer ranks than was asked for, or what started them contradicts itself.
    """
    trainer = machine.trainer
    place = place_of_process(machine.num_processes, trainer.num_nodes)
    if not launched_from_outside():
        if trainer.num_nodes > 1 and not alone_is_enough:
            raise ConfigError(
                key="trainer.num_nodes",
                got=trainer.num_nodes,
                because="this process was started alone, and several machines need torchrun, srun or launcher=ray",
                fix="Use torchrun --nnodes=... train.py ..., or trainer.num_nodes=1",
            )
        return run_dir
    _join_process_group(machine, place)
    shared = [str(run_dir.root)]
    dist.broadcast_object_list(shared, src=0)
    return RunDirectory(Path(shared[0]))


def smallest_of_ranks(number: int) -> int:
    """The smallest number that any rank gives; alone, its own."""
    if not dist.is_initialized():
        return number
    numbers = [number] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return min(numbers)


def on_rank_zero(action: Callable[[], object]) -> None:
    """Let rank 0 do something for all; every rank calls it.

    Raises:
        RLModuleError: what went wrong on rank 0, on every rank.
    """
    problem: list[RLModuleError | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except RLModuleError as error:
            problem = [error]
    if dist.is_initialized():
        told = [None if problem[0] is None else str(problem[0])]
        dist.broadcast_object_list(told, src=0)
        if told[0] is not None:
            raise problem[0] or RLModuleError(told[0])
    elif problem[0] is not None:
        raise problem[0]


def meet(machine: Machine, timeout: float) -> None:
    """Let the ranks that a launcher has started find each other: on one machine through a file and no port.

    Args:
        machine: where the run happens.
        timeout: seconds that a rank may be silent; collectives wait for half an hour at least.
    """
    if not started_by_launcher() or machine.world_size == 1 or dist.is_initialized():
        return
    place = place_of_process(machine.num_processes, machine.trainer.num_nodes)
    store = os.environ.get(STORE)
    dist.init_process_group(
        _collectives_of(machine, place),
        init_method="env://" if store is None else f"file://{store}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=max(timeout, _COLLECTIVE_SECONDS)),
    )


def _join_process_group(machine: Machine, place: ProcessPlace) -> None:
    """Lightning takes the group over."""
    if dist.is_initialized():
        return
    backend = _collectives_of(machine, place)
    if "RANK" in os.environ:
        check_meeting_point()
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size)
        return
    dist.init_process_group(backend, init_method=_meeting_of_slurm(), rank=place.rank, world_size=place.world_size)


def _meeting_of_slurm() -> str:
    """Where the tasks of a SLURM step meet: on its first host, at a port made of the job's number."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((os.environ[name] for name in names if name in os.environ), "127.0.0.1")
    host = os.environ.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(hosts)
    port = os.environ.get("MASTER_PORT") or 15_000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10_000
    return f"tcp://{host}:{port}"


def _collectives_of(machine: Machine, place: ProcessPlace) -> str:
    """The backend of torch.distributed for this machine's devices, after each rank has taken its own device."""
    if machine.device != "cpu":
        torch.accelerator.set_device_index(place.local_rank)  # what is sent before Lightning starts goes from there
    return support_of(machine.device).collectives
