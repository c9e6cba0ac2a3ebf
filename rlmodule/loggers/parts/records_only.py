"""A logger that is told everything as records, and gives Lightning what it asks of any logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger

from rlmodule.records.run_logger import RunLogger


class RecordsOnly(RunLogger, Logger):
    """Base of loggers that are none of Lightning's own; what Lightning itself would log, it does not."""

    @property
    def name(self) -> str:
        """Lightning's name of the logger: that of its module."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def version(self) -> str:
        """There is one version: the run directory belongs to one run."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Nothing: metrics come as records."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``begin`` has the settings."""
