"""Kinds of devices that PyTorch knows and Lightning does not: what Lightning asks of one, answered by torch's module.

Leaves out what else a device needs (``core/devices.py``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch.accelerators import Accelerator


class TorchAccelerator(Accelerator):
    """A device whose module in torch (``torch.npu``, ``torch.xpu``) has the calls of ``torch.cuda``."""

    kind: ClassVar[str]

    def setup_device(self, device: torch.device) -> None:
        """Make it the current one of its kind."""
        torch.get_device_module(self.kind).set_device(device)

    def teardown(self) -> None:
        """Give back memory that is kept for later."""
        torch.get_device_module(self.kind).empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """None."""
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """Numbers of the first ``devices`` devices, or those given."""
        return list(range(int(devices))) if isinstance(devices, int | str) else list(devices)

    @classmethod
    def get_parallel_devices(cls, devices: list[int]) -> list[torch.device]:
        """The devices of these numbers."""
        return [torch.device(cls.kind, number) for number in devices]

    @classmethod
    def auto_device_count(cls) -> int:
        """How many there are."""
        return int(torch.get_device_module(cls.kind).device_count())

    @classmethod
    def is_available(cls) -> bool:
        """Whether there is one."""
        return bool(torch.get_device_module(cls.kind).is_available())

    @classmethod
    def name(cls) -> str:
        """Its name in PyTorch."""
        return cls.kind


class NPUAccelerator(TorchAccelerator):
    """Ascend, by ``torch_npu``."""

    kind = "npu"


class XPUAccelerator(TorchAccelerator):
    """Intel's GPUs, by PyTorch itself."""

    kind = "xpu"


OWN = {made.kind: made for made in (NPUAccelerator, XPUAccelerator)}


def accelerator_of(device: str) -> str | Accelerator:
    """What Lightning's trainer is given for a kind of device: its own name for it, or one of ours."""
    return OWN[device]() if device in OWN else device
