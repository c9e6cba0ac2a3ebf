"""Tables of raw rows by position, whatever file they are in: only the rows that are read are held in memory.

A table gives plain dicts and knows the location of each row, so that an error can name it. Leaves out files
(``files.py``, ``readers/``) and what columns mean (``formats.py``).
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar, overload

RawRow = dict[str, Any]
T = TypeVar("T")

BATCH_ROWS = 128  # rows turned into Python objects and tokens at a time; a token costs about 100 bytes while encoding
NAMED_TABLES = 4  # that the name of a chain lists; of more it gives the number


class RowTable(ABC):
    """Raw rows of one source, read on demand.

    Args:
        name: the file, or its name in errors.
        columns: every column that some row has.
    """

    name: str
    columns: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int:
        """Rows."""

    @abstractmethod
    def location(self, row: int) -> str:
        """Location of row ``row`` (from 0) for errors: ``file:line``, or ``file:row`` where there are no lines."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> list[RawRow]:
        """The rows of these positions, in the same order."""

    def batches(self, columns: Sequence[str]) -> Iterator[list[RawRow]]:
        """All rows in order, a batch at a time; other columns than ``columns`` may be missing from them."""
        for rows in in_batches(len(self)):
            yield self.select(rows)


def in_batches(count: int) -> Iterator[range]:
    """The rows 0 to ``count - 1`` in order, as many at a time as are held in memory."""
    for first in range(0, count, BATCH_ROWS):
        yield range(first, min(first + BATCH_ROWS, count))


class LazyRows(Sequence[T], ABC, Generic[T]):
    """Rows that are made when they are needed; several at once are cheaper than one by one."""

    @abstractmethod
    def select(self, indices: Sequence[int]) -> list[T]:
        """The rows of these positions, in the same order."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        return self.select([range(len(self))[index]])[0]


def select_rows(rows: Sequence[T], indices: Sequence[int]) -> list[T]:
    """The rows of these positions, read together where they are on disk; none where a rank has no share."""
    if not indices:
        return []
    return rows.select(indices) if isinstance(rows, LazyRows) else [rows[index] for index in indices]


class MemoryTable(RowTable):
    """Rows already in memory: those of an environment, or a .json file, which cannot be read in part."""

    def __init__(self, name: str, rows: Sequence[RawRow]) -> None:
        self.name = name
        self.columns = tuple(dict.fromkeys(column for row in rows for column in row))
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def location(self, row: int) -> str:
        return f"{self.name}:{row + 1}"

    def select(self, rows: Sequence[int]) -> list[RawRow]:
        return [self._rows[row] for row in rows]


class FirstRows(RowTable):
    """The first rows of another table.

    Args:
        table: has at least ``count`` of them.
    """

    def __init__(self, table: RowTable, count: int) -> None:
        self.name, self.columns = table.name, table.columns
        self._table, self._count = table, count

    def __len__(self) -> int:
        return self._count

    def location(self, row: int) -> str:
        return self._table.location(row)

    def select(self, rows: Sequence[int]) -> list[RawRow]:
        return self._table.select(rows)

    def batches(self, columns: Sequence[str]) -> Iterator[list[RawRow]]:
        left = self._count
        for batch in self._table.batches(columns):
            yield batch[:left]
            left -= len(batch)
            if left <= 0:
                return


def first_rows(tables: Sequence[RowTable], limit: int | None) -> list[RowTable]:
    """The first ``limit`` rows of tables end to end; None keeps all. Tables of which none are kept are left out."""
    kept, left = list[RowTable](), limit
    for table in tables:
        count = len(table) if left is None else min(left, len(table))
        if count:
            kept.append(table if count == len(table) else FirstRows(table, count))
        left = None if left is None else left - count
    return kept


class TableChain:
    """Tables end to end: rows are counted over all of them.

    Args:
        tables: one per file.
    """

    def __init__(self, tables: Sequence[RowTable]) -> None:
        self.name = _listed([table.name for table in tables])
        self.tables = tuple(tables)
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def location(self, row: int) -> str:
        """``file:line`` of a row."""
        table, inside = self._locate(row)
        return self.tables[table].location(inside)

    def select(self, rows: Sequence[int]) -> list[tuple[int, RawRow]]:
        """(number of the table, row) of these positions, in the same order; each file is visited once."""
        located = [self._locate(row) for row in rows]
        found: dict[int, RawRow] = {}
        for index, table in enumerate(self.tables):
            wanted = [position for position, (holder, _) in enumerate(located) if holder == index]
            raw_rows = table.select([located[position][1] for position in wanted]) if wanted else []
            found |= dict(zip(wanted, raw_rows, strict=True))
        return [(located[position][0], found[position]) for position in range(len(rows))]

    def _locate(self, row: int) -> tuple[int, int]:
        table = bisect.bisect_right(self._ends, row)
        return table, row - (self._ends[table - 1] if table else 0)


def _listed(names: Sequence[str]) -> str:
    if len(names) <= NAMED_TABLES:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"
