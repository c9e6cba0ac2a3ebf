"""Arrow data in groups of rows, one group in memory at a time: what .parquet and .arrow files have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from rlmodule.core.errors import DataError, in_one_line
from rlmodule.data.arrow import Converter
from rlmodule.data.tables import BATCH_ROWS, RawRow, RowTable

# Texts that are no UTF-8, times beyond Python's, time zones that nobody knows (a KeyError).
_UNREADABLE = (pa.ArrowException, ValueError, OverflowError, LookupError, OSError)


class RowGroups(RowTable):
    """Python objects are made of single batches and rows; random access reads whole groups, each once.

    Args:
        name: the file.
        schema: of its columns.
        sizes: rows of each group.
        read: (number of a group, columns, None for all) -> its rows.
    """

    def __init__(
        self,
        name: str,
        schema: pa.Schema,
        sizes: Sequence[int],
        read: Callable[[int, Sequence[str] | None], pa.Table | pa.RecordBatch],
    ) -> None:
        self.name = name
        self.columns = tuple(schema.names)
        for column in self.columns:
            if self.columns.count(column) > 1:
                raise DataError(location=name, because=f"two columns are called '{column}'", fix="Rename one of them")
        self._read = read
        self._to_python = Converter(schema)
        self._first = np.cumsum([0, *sizes])  # first row of each group, and the number of rows
        self._cached: tuple[int, pa.Table | pa.RecordBatch] | None = None

    def __len__(self) -> int:
        return int(self._first[-1])

    def location(self, row: int) -> str:
        return f"{self.name}:{row + 1}"

    def select(self, rows: Sequence[int]) -> list[RawRow]:
        groups = np.searchsorted(self._first, np.asarray(rows), side="right") - 1
        found: list[RawRow] = [{}] * len(rows)
        for index in np.argsort(groups, kind="stable"):  # each group is read once
            group = int(groups[index])
            table = self._group(group)
            [found[index]] = self.plain(table.slice(rows[index] - int(self._first[group]), 1))
        return found

    def batches(self, columns: Sequence[str]) -> Iterator[list[RawRow]]:
        there = [column for column in columns if column in self.columns]
        for group, size in enumerate(np.diff(self._first)):  # one by one: buffers of a group are freed before the next
            table = self._readable(group, there)
            for first in range(0, int(size), BATCH_ROWS):
                yield self.plain(table.slice(first, BATCH_ROWS))

    def _group(self, group: int) -> pa.Table | pa.RecordBatch:
        if self._cached is None or self._cached[0] != group:
            self._cached = None  # free one group before the next is read
            self._cached = group, self._readable(group, None)
        return self._cached[1]

    def _readable(self, group: int, columns: Sequence[str] | None) -> pa.Table | pa.RecordBatch:
        with self.errors_in_words():
            return self._read(group, columns)

    def plain(self, rows: pa.Table | pa.RecordBatch) -> list[RawRow]:
        """Arrow's rows as plain values.

        Raises:
            DataError: a value has no form in Python; names its column.
        """
        try:
            return self._to_python(rows.to_pylist())
        except _UNREADABLE as error:
            reason = error
        for column in rows.schema.names:
            try:
                rows.column(column).to_pylist()
            except _UNREADABLE as error:
                raise DataError(
                    location=self.name,
                    because=f"a value of column '{column}' cannot be read ({in_one_line(error)})",
                    fix="Write the file again, without the column or with values of another type",
                ) from None
        raise reason

    @contextmanager
    def errors_in_words(self) -> Iterator[None]:
        """Inside, what Arrow finds damaged in the file is a DataError."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                location=self.name, because=f"its rows are damaged ({in_one_line(error)})", fix="Write the file again"
            ) from None
