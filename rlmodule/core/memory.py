"""How much memory a machine or a device has left.

Leaves out what a run needs of it (``run/planning/``).
"""

from __future__ import annotations

from pathlib import Path

import torch

# Shares that may be used: an allocator on an accelerator loses some to fragments and to libraries' workspaces; host
# memory is also the system's.
ACCELERATOR_SHARE, HOST_SHARE = 0.9, 0.7
CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device, num_processes: int) -> float:
    """Bytes that one process may still use: of its CUDA device, or of host memory, which all processes of a run share.

    What PyTorch holds of a device and does not use counts as free.
    """
    if device.type != "cuda":
        return HOST_SHARE * free_host_memory() / num_processes
    free, _ = torch.cuda.mem_get_info(device)
    return ACCELERATOR_SHARE * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


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
