"""Kinds of devices and their makers: which one this machine has, and what each needs, in one table.

A new kind is an entry of ``DEVICES``, and an accelerator in ``run/build/accelerators.py`` where Lightning has none.
Leaves out which strategy runs where (``strategies/registry.py``).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rlmodule.core.errors import ConfigError, DependencyError, did_you_mean

ANY_VENDOR = None
# Attention over packed rows: by PyTorch's kernel for uneven lengths, or sample by sample.
VARLEN, SDPA = "varlen", "sdpa"


@dataclass(frozen=True)
class Adaptor:
    """A module that changes a backend's packages for a device, and so must be imported before them.

    Args:
        module: dotted name.
        patch: its function that takes the backend's arguments once they are known; None where there is none.
        source: how to install it, as a sentence.
    """

    module: str
    patch: str | None
    source: str


@dataclass(frozen=True)
class DeviceSupport:
    """What a kind of device of one vendor needs.

    Args:
        collectives: name of its backend of torch.distributed.
        attention: ``varlen`` where PyTorch's kernel for uneven lengths may be used, else ``sdpa``.
        package: module without which PyTorch does not know the device; None where PyTorch brings it along.
        adaptors: backend -> what comes before its own packages.
        was_run: whether this project has been run on such a device.
    """

    collectives: str
    attention: str = SDPA
    package: str | None = None
    adaptors: Mapping[str, Adaptor] = field(default_factory=dict)
    was_run: bool = False


MINDSPEED = Adaptor(
    module="mindspeed.megatron_adaptor",
    patch="repatch",
    source="Install MindSpeed from its repository, https://gitee.com/ascend/MindSpeed; PyPI has no wheel of it",
)

# (device, vendor) -> what it needs. AMD's and MetaX's PyTorch call their devices cuda and their collectives nccl.
DEVICES: dict[tuple[str, str | None], DeviceSupport] = {
    ("cpu", ANY_VENDOR): DeviceSupport("gloo", was_run=True),
    ("cuda", "nvidia"): DeviceSupport("nccl", attention=VARLEN, was_run=True),
    ("cuda", "amd"): DeviceSupport("nccl"),
    ("cuda", "metax"): DeviceSupport("nccl"),
    ("cuda", ANY_VENDOR): DeviceSupport("nccl"),
    ("npu", "ascend"): DeviceSupport("hccl", package="torch_npu", adaptors={"megatron": MINDSPEED}),
    ("xpu", ANY_VENDOR): DeviceSupport("xccl"),
    ("mps", ANY_VENDOR): DeviceSupport("gloo"),
}


def support_of(device: str, vendor: str | None = None) -> DeviceSupport:
    """The entry of a device: of its vendor, else of any.

    Args:
        device: cpu, cuda, ...
        vendor: None takes ``RLMODULE_VENDOR``, or what the machine has.

    Raises:
        ConfigError: the table has no such device.
    """
    found = _entry(device, vendor)
    if found is None:
        known = sorted({device for device, _ in DEVICES})
        because = "core/devices.py has no entry for such a device"
        raise ConfigError(key="device", got=device, because=because, fix=did_you_mean(device, known))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # asked inside compiled blocks
def attention_of(device: str) -> str:
    """How packed rows attend on a device: ``varlen``, or ``sdpa``, also where nothing is known of it."""
    found = _entry(device)
    return SDPA if found is None else found.attention


def adaptor_of(backend: str, device: str, vendor: str) -> Adaptor | None:
    """What must come before a backend's own packages on a device; None for nothing."""
    found = _entry(device, vendor)
    return None if found is None else found.adaptors.get(backend)


def _entry(device: str, vendor: str | None = None) -> DeviceSupport | None:
    return DEVICES.get((device, vendor or vendor_here(device))) or DEVICES.get((device, ANY_VENDOR))


def import_package_of(device: str) -> None:
    """Import the module without which PyTorch does not know a device that was asked for; nothing for most.

    Raises:
        DependencyError: it is not installed.
    """
    for (kind, _), support in DEVICES.items():
        if kind == device and support.package is not None:
            try:
                importlib.import_module(support.package)
            except ModuleNotFoundError as error:
                asked = f"trainer.accelerator={device}"
                raise DependencyError(package=str(error.name), needed_by=asked, extra=device) from error


def device_here() -> str:
    """``RLMODULE_DEVICE``, or the kind of device that this machine has."""
    return os.environ.get("RLMODULE_DEVICE") or detect_device()


def vendor_here(device: str) -> str:
    """``RLMODULE_VENDOR``, or the maker of this machine's devices of that kind."""
    return os.environ.get("RLMODULE_VENDOR") or detect_vendor(device)


def detect_device() -> str:
    """``cuda``, ``npu``, ``xpu``, ``mps`` or ``cpu``: the accelerator torch sees."""
    if torch.cuda.is_available():
        return "cuda"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"


@functools.cache
def detect_vendor(device: str) -> str:
    """Maker of the device; ``generic`` where it does not matter."""
    if device == "npu":
        return "ascend"
    if device != "cuda":
        return "generic"
    if torch.version.hip:
        return "amd"
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((vendor for vendor in ("metax", "iluvatar", "moorethreads") if vendor in name), "nvidia")
