"""How much memory a device of this machine has for one process of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from rlmodule.run.build.machine import Machine

# Shares that a plan may use: an allocator on an accelerator loses some to fragments and to libraries' workspaces; host
# memory is also the system's.
ACCELERATOR_SHARE, HOST_SHARE = 0.9, 0.7
CGROUP = Path("/sys/fs/cgroup")


def device_memory(machine: Machine) -> float:
    """Bytes that one process may use: as configured, of the accelerator, or its share of free host memory."""
    given = machine.trainer.device_memory_gb
    if given is not None:
        return ACCELERATOR_SHARE * given * 1e9
    if machine.device == "cuda" and torch.cuda.is_available():
        return ACCELERATOR_SHARE * torch.cuda.get_device_properties(0).total_memory
    return HOST_SHARE * free_host_memory() / machine.num_processes


def free_host_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> float:
    """Bytes of host memory that nothing uses, within the limit of this control group; Linux tells, others say 8e9."""
    if not proc.exists():
        return 8e9
    lines = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
    free = float(lines["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        free = min(free, float(limit.read_text()) - float(used.read_text()))
    return max(free, 0.0)
