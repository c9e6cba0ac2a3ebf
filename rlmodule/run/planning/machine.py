"""A machine that need not be this one: devices and processes as they are asked for, whatever is here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlmodule.core.devices import detect_device
from rlmodule.run.build.machine import Machine


@dataclass(frozen=True)
class PlannedMachine(Machine):
    """The machine that a run asks for; ``auto`` stands for what this one has."""

    @property
    def device(self) -> str:
        """Kind of device: cpu, cuda, ..."""
        asked = self.trainer.accelerator
        if asked != "auto":
            return {"gpu": "cuda"}.get(asked, asked)
        return detect_device()

    @property
    def num_processes(self) -> int:
        """Processes on one machine."""
        devices = self.trainer.devices
        return max(1, torch.accelerator.device_count()) if devices == "auto" else int(devices)
