"""What a logger can show of a run beside the curves that Lightning knows: records, tables, histograms, settings.

Leaves out how any of it is shown (``loggers/``) and when (``callbacks/``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rlmodule.records.metrics_log import Record


class RunLogger:
    """Base of every logger. Each method does nothing unless a logger overrides it, so a logger shows what it can.

    Only the first process calls them: ``begin`` once, then records, tables and histograms in the order of the run,
    and ``end`` once if the run reaches its end. A method that cannot write raises OSError; the user is then warned
    once, and training goes on.

    ``output`` names what could not be written, for that warning.
    """

    output: ClassVar[str]

    def begin(self, hparams: Mapping[str, object], history: Sequence[Record]) -> None:
        """The run starts, or goes on after a resume.

        Args:
            hparams: every setting, dotted key -> plain value.
            history: records from before the checkpoint that the run resumes from; empty for a new run.
        """

    def write_record(self, record: Record) -> None:
        """Metrics of one step, iteration or validation."""

    def write_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """A table for people to read; a cell is a text, a number or None."""

    def write_histogram(self, name: str, values: Sequence[float], step: int) -> None:
        """How ``values`` (at least one, all finite) are distributed."""

    def end(self) -> None:
        """The run has reached its end; Lightning closes the logger after this."""
