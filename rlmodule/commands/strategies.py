"""``command=strategies``: which backend spreads which kind of model on which device, and what this machine has of it.

Imports every backend whose packages are installed, which takes as long as they take. Leaves out what a strategy costs
(``command=plan``) and whether its numbers are right (``command=parity``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from rich.console import Console
from rich.table import Table

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.core.backends import BackendStatus
from rlmodule.core.devices import DEVICES, DeviceSupport, detect_device, device_here, vendor_here

ANY = "any"


@COMMANDS.register
@dataclass(frozen=True)
class Strategies(Command):
    """Show the registry of strategies and the table of devices."""

    has_run_dir: ClassVar[bool] = False

    def __call__(self, invocation: Invocation) -> int:
        """Print both tables; no model is loaded."""
        registry = invocation.run.registry
        backends = [registry.status(name) for name in registry.backends()]
        console = Console(highlight=False, soft_wrap=False)
        console.print(words_of_machine(), markup=False)
        console.print(table_of_strategies(backends))
        console.print(table_of_devices())
        console.print(
            "RLMODULE_DEVICE and RLMODULE_VENDOR ask about another machine; a run needs the device itself.",
            markup=False,
        )
        return 0


def words_of_machine() -> str:
    """Device and vendor that strategies are looked up for, and who says so."""
    device = device_here()
    vendor = vendor_here(device)
    said = [name for name in ("RLMODULE_DEVICE", "RLMODULE_VENDOR") if os.environ.get(name)]
    by = f"given by {' and '.join(said)}; this machine has {detect_device()}" if said else "detected"
    return f"{'device':<12} {device}, vendor {vendor}  ({by})"


def table_of_strategies(backends: list[BackendStatus]) -> Table:
    """A row for each backend and set of devices."""
    table = _table("strategy", "model types", "device/vendor", "here")
    for status in backends:
        name = status.name if status.package == "rlmodule" else f"{status.name} ({status.package})"
        if not status.places:
            table.add_row(name, "", "", _here(status, ()))
        for places, model_types in _by_places(status).items():
            devices = ", ".join(device if vendor is None else f"{device}/{vendor}" for device, vendor in places)
            table.add_row(name, "\n".join(model_types), devices, _here(status, model_types))
    return table


def _by_places(status: BackendStatus) -> dict[tuple[tuple[str, str | None], ...], tuple[str, ...]]:
    """Devices -> the model types that are registered for just those."""
    grouped: dict[tuple[tuple[str, str | None], ...], tuple[str, ...]] = {}
    for model_type, places in status.places.items():
        grouped[places] = (*grouped.get(places, ()), model_type)
    return grouped


def _here(status: BackendStatus, model_types: tuple[str, ...]) -> str:
    """The classes that a run gets, or why it gets none."""
    found = sorted({status.found[model_type] for model_type in model_types if model_type in status.found})
    return "\n".join(found) or f"no: {status.problem}".replace("[", r"\[")  # rich reads brackets as styles


def _table(*titles: str) -> Table:
    """Columns that break a long name instead of cutting it."""
    table = Table()
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def table_of_devices() -> Table:
    """A row for each kind of device and vendor."""
    table = _table("device", "vendor", "collectives", "attention", "imported first", "run by us", "here")
    for (device, vendor), support in DEVICES.items():
        first = [name for name in (support.package,) if name is not None]
        first += [f"{adaptor.module} (strategy={name})" for name, adaptor in support.adaptors.items()]
        table.add_row(
            device,
            vendor or ANY,
            support.collectives,
            support.attention,
            "\n".join(first),
            "yes" if support.was_run else "not run on the device",
            _presence(device, vendor, support),
        )
    return table


def _presence(device: str, vendor: str | None, support: DeviceSupport) -> str:
    """Whether this machine has such a device."""
    if device == "cpu":
        return "yes"
    if support.package is not None and find_spec(support.package) is None:
        return f"no: {support.package} is not installed. pip install 'rlmodule\\[{device}]'"
    is_there = device == detect_device() and vendor in (None, vendor_here(device))
    return "yes" if is_there else "no such device"
