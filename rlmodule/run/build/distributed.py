"""Joins ranks that torchrun or srun started, before weights are loaded.

Leaves out ranks that the program starts itself (``run/launchers/local.py``).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from rlmodule.core.errors import ConfigError
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.build.machine import Machine
from rlmodule.run.launchers.local import launched_from_outside


def init_distributed(machine: Machine, run_dir: RunDirectory) -> tuple[RunDirectory, bool]:
    """Meet the other ranks, if there are any yet.

    Returns:
        The run directory, which is the first rank's, and whether this is the first rank.

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
        return run_dir, True
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
    return RunDirectory(Path(shared[0])), dist.get_rank() == 0


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
