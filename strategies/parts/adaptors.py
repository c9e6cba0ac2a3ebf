"""Modules that change a backend's packages for a device: imported before them, and told its arguments later.

MindSpeed makes Megatron run on Ascend in that way. Which backend needs what on which device is in ``core/devices.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rlmodule.core.devices import adaptor_of
from rlmodule.core.errors import ConfigError


def import_adaptor(backend: str, device: str, vendor: str) -> None:
    """Import what must come before the packages of a backend; nothing on most devices.

    Raises:
        ConfigError: it is not installed; says where it is to be had.
    """
    adaptor = adaptor_of(backend, device, vendor)
    if adaptor is None:
        return
    try:
        importlib.import_module(adaptor.module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            key="strategy",
            got=backend,
            because=f"on device={device} it needs {adaptor.module}, and there is no module named '{error.name}'",
            fix=adaptor.source,
        ) from error


def patch_backend(backend: str, device: str, vendor: str, arguments: Mapping[str, Any]) -> None:
    """Tell the adaptor of a backend its arguments, before the backend makes its first process group.

    Args:
        arguments: as the backend's own command line would have them.
    """
    adaptor = adaptor_of(backend, device, vendor)
    if adaptor is not None and adaptor.patch is not None:
        getattr(importlib.import_module(adaptor.module), adaptor.patch)(dict(arguments))
