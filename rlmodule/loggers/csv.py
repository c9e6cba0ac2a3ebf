"""``metrics.csv``: one line per step, iteration and validation, one column per metric, for a spreadsheet or pandas.

Lightning's own CSV logger deletes the file of the run that is resumed, so this one is our own.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

from rlmodule.loggers import LOGGERS, LoggedRun
from rlmodule.loggers.parts.records_only import RecordsOnly
from rlmodule.records.metrics_log import Record, atomic_write

FILE_NAME = "metrics.csv"
FIRST_COLUMNS = ("kind", "step", "iteration")


@LOGGERS.register
@dataclass(frozen=True)
class CSVConfig:
    """The numbers of ``metrics.jsonl`` as a table, ``<run_dir>/metrics.csv``."""

    def connect(self, run: LoggedRun) -> CSVLogger:
        """Build the logger of one run."""
        return CSVLogger(run.run_dir / FILE_NAME)


class CSVLogger(RecordsOnly):
    """Appends lines; a metric that was never seen before adds a column, and the file is then written anew.

    A metric that a record does not have is an empty cell; NaN and infinity are written as ``nan`` and ``inf``.

    Args:
        path: the file.
    """

    output: ClassVar[str] = FILE_NAME

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._records: list[Record] = []
        self._columns: dict[str, None] = {}  # metrics in the order in which they first came
        self._file: TextIO | None = None

    def begin(self, hparams: Mapping[str, object], history: Sequence[Record]) -> None:
        """Write what was logged before a resume."""
        self._records = list(history)
        self._columns = {name: None for record in history for name in record.metrics}
        self._rewrite()

    def write_record(self, record: Record) -> None:
        """Append one line."""
        self._records.append(record)
        is_known = self._columns.keys() >= record.metrics.keys()
        self._columns |= dict.fromkeys(record.metrics)
        if is_known and self._file is not None:
            csv.writer(self._file).writerow(self._cells(record))
        else:
            self._rewrite()

    def _rewrite(self) -> None:
        self._close()
        with atomic_write(self.path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([*FIRST_COLUMNS, *self._columns])
            csv.writer(file).writerows(map(self._cells, self._records))
        self._file = self.path.open("a", buffering=1, newline="", encoding="utf-8")

    def _cells(self, record: Record) -> list[Any]:
        return [record.kind, record.step, record.iteration, *(record.metrics.get(name) for name in self._columns)]

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def finalize(self, status: str) -> None:
        self._close()
