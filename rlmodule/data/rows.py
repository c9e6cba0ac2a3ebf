"""Rows of one split over all its files, with their columns chosen. Leaves out tokens (``prompts.py``)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmodule.core.errors import DataError
from rlmodule.data.config import DataConfig
from rlmodule.data.files import open_entry, open_files
from rlmodule.data.formats import ColumnKeys, choose_columns, top_level
from rlmodule.data.row import Row, look_up, read_row
from rlmodule.data.tables import RawRow, RowTable, TableChain, first_rows

_NUMBER = re.compile(r"(?:[^\W\d]+[\s:]+)?([-+]?\d+(?:\.\d+)?)")  # perhaps behind one word


class TableRows:
    """The rows of all files, entry after entry.

    Args:
        entries: the tables of each entry of ``data.train_files``.
    """

    def __init__(self, entries: Sequence[Sequence[RowTable]]) -> None:
        self.chain = TableChain([table for entry in entries for table in entry])
        self.entry_ends = tuple(accumulate(sum(len(table) for table in entry) for entry in entries))

    def __len__(self) -> int:
        return len(self.chain)

    def numbers(self, column: str) -> NDArray[np.float64]:
        """[rows] the numbers of a column, which may stand behind a word (``Level 3``).

        Raises:
            DataError: a file lacks the column, or a row has no number there.
        """
        found: list[float] = []
        for table in self.chain.tables:
            if top_level(column) not in table.columns and column not in table.columns:
                raise DataError(
                    location=table.name,
                    because=f"there is no column '{column}' to order rows by; its columns are "
                    f"{', '.join(table.columns)}",
                    fix="Set data.curriculum to one of them",
                )
            for batch in table.batches([column if column in table.columns else top_level(column)]):
                found += [_number(raw, column, self.chain.location(len(found) + i)) for i, raw in enumerate(batch)]
        return np.array(found)


class RowSource(TableRows):
    """The rows of one split over all its files; columns are checked when it is made.

    Args:
        entries: as in ``TableRows``.
        format: a name in FORMATS, or ``auto``.
        keys: columns named by the user.

    Raises:
        DataError: a file lacks a column.
    """

    def __init__(self, entries: Sequence[Sequence[RowTable]], format: str, keys: ColumnKeys) -> None:
        super().__init__(entries)
        self.name = self.chain.name
        self._columns = tuple(choose_columns(table, format, keys) for table in self.chain.tables)

    def location(self, row: int) -> str:
        """``file:line`` of a row."""
        return self.chain.location(row)

    def select(self, rows: Sequence[int]) -> list[Row]:
        """The rows of these positions, in the same order; each file is visited once."""
        found = zip(rows, self.chain.select(rows), strict=True)
        return [read_row(raw, self._columns[table], self.location(row)) for row, (table, raw) in found]

    def prompts(self) -> Iterator[list[Row]]:
        """All rows in order, a batch at a time, with no more than their prompts and tools."""
        for table, columns in zip(self.chain.tables, self._columns, strict=True):
            inside = 0
            for batch in table.batches(columns.of_prompt):
                yield [read_row(raw, columns, table.location(inside + i)) for i, raw in enumerate(batch)]
                inside += len(batch)

    def check_completions(self) -> None:
        """Every file has a column with responses, or conversations that hold them.

        Raises:
            DataError: names the file and its columns.
        """
        for table, columns in zip(self.chain.tables, self._columns, strict=True):
            [first] = table.select([0])
            if columns.completion is None and isinstance(read_row(first, columns, table.location(0)).prompt, str):
                raise DataError(
                    location=table.location(0),
                    because=f"no completion column to learn from; the columns are {', '.join(table.columns)}",
                    fix="Set data.completion_key to the one with the response",
                )

    def describe_columns(self, roles: Sequence[str], others: str) -> str:
        """For the run's plan: which column is read as what; see ``Columns.describe``."""
        tables = zip(self.chain.tables, self._columns, strict=True)
        lines = dict.fromkeys(columns.describe(roles, table.columns, others) for table, columns in tables)
        return " | ".join(lines)

    @property
    def has_tools(self) -> bool:
        """Whether a file has a column with tools that is read."""
        return any(columns.tools for columns in self._columns)


def open_rows(config: DataConfig, split: str, table: RowTable | None = None) -> RowSource:
    """The rows of ``split`` with their columns checked; needs no tokenizer.

    Args:
        config: where to look.
        split: ``train`` or ``test``; the rows of the latter come from ``val_files``.
        table: the rows of an environment, in place of files.

    Raises:
        ConfigError: a file is missing.
        DataError: a file has no rows, a bad line, or lacks a column.
    """
    if table is not None:
        return RowSource([first_rows([table], config.limit_of(split))], "rlmodule", ColumnKeys())
    return RowSource(open_split(config, split), config.format, config.column_keys)


def open_split(config: DataConfig, split: str) -> list[list[RowTable]]:
    """The tables of each entry of ``split``; of a validation set no rows beyond its limit.

    Raises:
        ConfigError: a file is missing.
        DataError: a file has no rows, or a bad line.
    """
    files, origin = config.files_of(split)
    assert files, f"{origin.key} is empty; ask has_validation first"
    if split == "train":
        return [open_entry(entry, origin) for entry in files]
    sets = config.val_sets.values()
    return [first_rows(open_files(entries, origin), config.limit_of(split)) for entries in sets]


def _number(raw: RawRow, column: str, location: str) -> float:
    value: Any = look_up(raw, column)
    if isinstance(value, str) and (found := _NUMBER.fullmatch(value.strip())):
        value = float(found[1])
    # The largest float, for whole numbers beyond it have no finite float either.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and abs(value) <= sys.float_info.max):
        raise DataError(
            location=location,
            because=f"column '{column}', which orders rows, holds {value!r:.80} and no number",
            fix="Fill it in, delete the row, or set data.curriculum to another column",
        )
    return float(value)
