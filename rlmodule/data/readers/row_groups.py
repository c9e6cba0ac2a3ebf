"""Arrow data in groups of rows, one group in memory at a time: what .parquet and .arrow files have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from rlmodule.data.arrow import Converter
from rlmodule.data.tables import BATCH_ROWS, RawRow, RowTable


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
            [found[index]] = self._to_python(table.slice(rows[index] - int(self._first[group]), 1).to_pylist())
        return found

    def batches(self, columns: Sequence[str]) -> Iterator[list[RawRow]]:
        there = [column for column in columns if column in self.columns]
        for group, size in enumerate(np.diff(self._first)):  # one by one: buffers of a group are freed before the next
            table = self._read(group, there)
            for first in range(0, int(size), BATCH_ROWS):
                yield self._to_python(table.slice(first, BATCH_ROWS).to_pylist())

    def _group(self, group: int) -> pa.Table | pa.RecordBatch:
        if self._cached is None or self._cached[0] != group:
            self._cached = None  # free one group before the next is read
            self._cached = group, self._read(group, None)
        return self._cached[1]
