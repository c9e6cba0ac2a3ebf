"""Tables with a header line: .csv, values between commas, and .tsv, between tabs.

Every value is a text, an empty one is no value. A conversation stands as JSON in its cell. Opening a file reads it once
and keeps only where each row begins; a row may span lines. Leaves out other dialects: semicolons, comments.
"""

from __future__ import annotations

import csv
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from rlmodule.core.errors import DataError
from rlmodule.data.json_text import turns_in
from rlmodule.data.readers.content import UTF8_MARK, Content
from rlmodule.data.readers.indexed import IndexedTable
from rlmodule.data.tables import RawRow


class DelimitedTable(IndexedTable):
    """The rows below a header line.

    Args:
        content: the file.
        delimiter: what stands between two values.

    Raises:
        DataError: ``file:line`` of a row with another number of values than the header, or of bad quotes.
    """

    def __init__(self, content: Content, delimiter: str) -> None:
        self._delimiter, name = delimiter, str(content.path)
        starts, numbers = array("q"), array("q")
        with content.open() as file:
            records = _records(file, name, delimiter)
            _, number, header = next(records, (0, 1, []))
            self.columns = _columns(header, f"{name}:{number}", delimiter)
            for start, number, cells in records:
                if len(cells) != len(header):
                    raise DataError(
                        location=f"{name}:{number}",
                        because=f"the row has {len(cells)} values and the header names {len(header)} columns",
                        fix='Put values that hold separators or line breaks between "quotes", or delete the row',
                    )
                self._row(cells, f"{name}:{number}")
                starts.append(start)
                numbers.append(number)
        super().__init__(content, self.columns, starts, numbers)

    def read_row(self, file: BinaryIO, location: str) -> RawRow:
        _, _, cells = next(_records(file, self.name, self._delimiter))
        return self._row(cells, location)

    def _row(self, cells: Sequence[str], location: str) -> RawRow:
        values = zip(self.columns, cells, strict=True)
        return {column: _value(cell, column, location) for column, cell in values}


class _Lines:
    """Lines of a file as text, with the place where the next one begins."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self.start, self.number = file.tell(), 1

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        text = line.removeprefix(UTF8_MARK) if self.start == 0 else line
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            because = f"byte {error.start + 1} (0x{text[error.start]:02x}) is not valid UTF-8"
            raise DataError(
                location=f"{self._name}:{self.number}", because=because, fix="Save the file as UTF-8"
            ) from None
        self.start += len(line)
        self.number += 1
        return decoded


def _records(file: BinaryIO, name: str, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
    """(first byte, first line, values) of each row from where ``file`` stands; blank lines are none."""
    csv.field_size_limit(sys.maxsize)  # Python's own limit of 131,072 characters is less than a long document
    lines = _Lines(file, name)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        start, number = lines.start, lines.number
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            ends_lines_otherwise = "new-line character" in str(error)
            raise DataError(
                location=f"{name}:{number}",
                because="a carriage return stands in it, not in quotes and not before a line feed"
                if ends_lines_otherwise
                else f"not a row of values: {error}",
                fix="Save the file with line feeds (LF or CRLF) at the end of its lines"
                if ends_lines_otherwise
                else 'Write a quote inside of quotes twice (""), or delete the row',
            ) from None
        if cells:
            yield start, number, cells


def _columns(header: Sequence[str], location: str, delimiter: str) -> tuple[str, ...]:
    """Names of the columns; one without a name, which is what pandas writes for its index, is called by its number."""
    names = [name.strip() or f"column {number}" for number, name in enumerate(header, start=1)]
    for name in names:
        if names.count(name) > 1:
            raise DataError(location=location, because=f"two columns are called '{name}'", fix="Rename one of them")
    other = next((mark for mark in ",;\t|" if len(names) == 1 and mark != delimiter and mark in names[0]), None)
    if other is not None:
        raise DataError(
            location=location,
            because=f"the header is a single column '{names[0]}', which holds {other!r}",
            fix="Separate values by commas in .csv files and by tabs in .tsv files",
        )
    return tuple(names)


def _value(cell: str, column: str, location: str) -> Any:
    try:
        return turns_in(cell) or cell or None
    except ValueError as error:
        raise DataError(
            location=location,
            because=f"column '{column}' holds {error}",
            fix="Write the column with json.dumps, or the file as .jsonl or .parquet",
        ) from None
