"""Callbacks of a run: one file each, the file's name is the callback's name. Leaves out training (``module.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rlmodule.core.registry import Registry

if TYPE_CHECKING:  # torch's event writer and lightning take seconds to import
    from lightning import Callback

    from rlmodule.callbacks.parts.context import RunContext


class CallbackConfig(Protocol):
    """Config of a callback: a frozen dataclass whose fields are its config keys."""

    def connect(self, context: RunContext) -> Callback:
        """Build the callback of one run."""


CALLBACKS: Registry[CallbackConfig] = Registry("callback", "rlmodule.callbacks")
