"""Where the curves of a run are shown: one file each, the file's name is the logger's name.

A logger is one of Lightning's that is also a ``RunLogger``. Leaves out what is logged (``callbacks/``) and
``metrics.jsonl``, which every run writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlmodule.core.registry import Registry

if TYPE_CHECKING:  # torch's event writer and lightning take seconds to import
    from lightning.pytorch.loggers import Logger


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told of the run before it starts.

    Args:
        run_dir: where the run writes.
        name: shown for it.
        tags: the user's words.
        hparams: dotted key -> plain value; what the command line sets comes first.
        resumed_step: last step of the checkpoint that the run resumes from; None for a new run.
    """

    run_dir: Path
    name: str = ""
    tags: Sequence[str] = ()
    hparams: Mapping[str, object] = field(default_factory=dict)
    resumed_step: int | None = None


class LoggerConfig(Protocol):
    """Config of a logger: a frozen dataclass whose fields are its config keys."""

    def connect(self, run: LoggedRun) -> Logger:
        """Build the logger of one run."""


LOGGERS: Registry[LoggerConfig] = Registry("logger", "rlmodule.loggers")
