"""How much memory a device of this machine has for one process of a run."""

from __future__ import annotations

import torch

from rlmodule.core.memory import ACCELERATOR_SHARE, HOST_SHARE, free_host_memory
from rlmodule.run.build.machine import Machine


def device_memory(machine: Machine) -> float:
    """Bytes that one process may use: as configured, of the accelerator, or its share of free host memory."""
    given = machine.trainer.device_memory_gb
    if given is not None:
        return ACCELERATOR_SHARE * given * 1e9
    if machine.device == "cuda" and torch.cuda.is_available():
        return ACCELERATOR_SHARE * torch.cuda.get_device_properties(0).total_memory
    return HOST_SHARE * free_host_memory() / machine.num_processes
