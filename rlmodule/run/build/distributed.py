"""Joins ranks that torchrun or srun started, before weights are loaded.

Leaves out ranks that the program starts itself (``run/launchers/local.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from rlmodule.core.errors import ConfigError, RLModuleError
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.build.machine import Machine
from rlmodule.run.launchers.local import STORE, launched_from_outside, process_rank

_COLLECTIVE_SECONDS = 1800.0  # torch's own limit for gloo


def init_distributed(machine: Machine, run_dir: RunDirectory) -> RunDirectory:
    """Meet the other ranks, if there are any yet.

    Returns:
        The run directory, which is the first rank's.

    Raises:
        ConfigError: there are more or fewer ranks than was asked for.
    """
    trainer = machine.trainer
    if not launched_from_outside():
        if trainer.num_nodes > 1:
            raise ConfigError(
                key="trainer.num_nodes",
                got=trainer.num_nodes,
                because="this process was started alone, and several machines need torchrun or srun",
                fix="Use torchrun --nnodes=... train.py ..., or trainer.num_nodes=1",
            )
        return run_dir
    _join_process_group()
    if dist.get_world_size() != machine.world_size:
        raise ConfigError(
            key="trainer.devices",
            got=trainer.devices,
            because=f"torchrun or srun started {dist.get_world_size()} processes, and trainer.devices x "
            f"trainer.num_nodes is {machine.world_size}",
            fix="Set trainer.devices to the processes of one machine and trainer.num_nodes to the machines",
        )
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


def meet(timeout: float) -> None:
    """Let the ranks that a supervisor has started on this machine find each other, through a file and no port.

    Args:
        timeout: seconds that a rank may be silent; collectives wait for half an hour at least.
    """
    store = os.environ.get(STORE)
    if store is None or dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=process_rank(),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=max(timeout, _COLLECTIVE_SECONDS)),
    )


def _join_process_group() -> None:
    """Lightning takes the group over."""
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
        return
    slurm = SLURMEnvironment()
    address = f"tcp://{slurm.main_address}:{slurm.main_port}"
    dist.init_process_group(backend, init_method=address, rank=slurm.global_rank(), world_size=slurm.world_size())
