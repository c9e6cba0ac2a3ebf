"""Where this process sits and what it runs on. The one place that asks torch, the environment and the machine."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlmodule.core.contract import Layout
from rlmodule.core.errors import ConfigError


def detect_device() -> str:
    """``cuda``, ``npu``, ``xpu``, ``mps`` or ``cpu``: the accelerator torch sees."""
    if torch.cuda.is_available():
        return "cuda"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"


def detect_vendor(device: str) -> str:
    """Who made the device; ``generic`` where it does not matter."""
    if device == "npu":
        return "ascend"
    if device != "cuda":
        return "generic"
    if torch.version.hip:
        return "amd"
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((vendor for vendor in ("metax", "iluvatar", "moorethreads") if vendor in name), "nvidia")


def current_layout(sp_size: int = 1, tp_size: int = 1) -> Layout:
    """The layout of the running process group, or of a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return Layout()
    return Layout(world_size=dist.get_world_size(), rank=dist.get_rank(), sp_size=sp_size, tp_size=tp_size)


def sequence_group(layout: Layout) -> dist.ProcessGroup | None:
    """The ranks that share this process's rows; None where rows are not cut. Every rank of the world calls it."""
    if layout.sp_size == 1:
        return None
    mine = None
    for data_rank in range(layout.dp_size):
        for tp_rank in range(layout.tp_size):
            first = data_rank * layout.sp_size * layout.tp_size + tp_rank
            ranks = [first + i * layout.tp_size for i in range(layout.sp_size)]
            group = dist.new_group(ranks)
            mine = group if layout.rank in ranks else mine
    return mine


def check_degrees(world_size: int, *, sp_size: int = 1, tp_size: int = 1, replicas: int = 1) -> None:
    """Refuse degrees that do not tile the processes, before any process is started.

    Raises:
        ConfigError: names the degree and what it does not divide.
    """
    left = world_size
    for key, size in (("tp_size", tp_size), ("sp_size", sp_size), ("dp_replicate", replicas)):
        if left % size:
            raise ConfigError(
                key=f"strategy.{key}",
                got=size,
                because=f"it does not divide the {left} processes that are left to it, of {world_size} in all",
                fix=f"Use strategy.{key}=1, or trainer.devices so that tensor x sequence x replicas divides them",
            )
        left //= size
