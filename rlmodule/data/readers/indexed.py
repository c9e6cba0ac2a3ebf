"""Text files whose rows are read from disk when they are asked for; in memory is where each begins."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from rlmodule.data.readers.content import Content
from rlmodule.data.tables import RawRow, RowTable


class IndexedTable(RowTable):
    """Base of the tables of text files; a subclass finds the rows and reads one.

    Args:
        content: the file.
        columns: its columns.
        starts: byte at which each row begins.
        numbers: line, from 1, at which each row begins.
    """

    def __init__(self, content: Content, columns: Sequence[str], starts: array[int], numbers: array[int]) -> None:
        self.name, self.columns = str(content.path), tuple(columns)
        self._content = content
        self._starts = np.frombuffer(starts, dtype=np.int64)
        self._numbers = np.frombuffer(numbers, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def location(self, row: int) -> str:
        return f"{self.name}:{self._numbers[row]}"

    def select(self, rows: Sequence[int]) -> list[RawRow]:
        found = []
        with self._content.open() as file:
            for row in rows:
                file.seek(int(self._starts[row]))
                found.append(self.read_row(file, self.location(row)))
        return found

    @abstractmethod
    def read_row(self, file: BinaryIO, location: str) -> RawRow:
        """The row that begins here.

        Raises:
            DataError: names ``location``.
        """
