"""Where the curves of a run are shown: one file each, the file's name is the logger's name.

A logger is one of Lightning's that is also a ``RunLogger``. Leaves out what is logged (``callbacks/``) and
``metrics.jsonl``, which every run writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlmodule.core.registry import Registry

if TYPE_CHECKING:  # torch's event writer and lightning take seconds to import
    from lightning.pytorch.loggers import Logger


class LoggerConfig(Protocol):
    """Config of a logger: a frozen dataclass whose fields are its config keys."""

    def connect(self, run_dir: Path, *, hparams: Mapping[str, object], resumed_step: int | None) -> Logger:
        """Build the logger of one run.

        Args:
            run_dir: where the run writes.
            hparams: every setting, dotted key -> plain value.
            resumed_step: last step of the checkpoint that the run resumes from; None for a new run.
        """


LOGGERS: Registry[LoggerConfig] = Registry("logger", "rlmodule.loggers")
