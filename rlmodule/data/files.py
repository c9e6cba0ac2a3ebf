"""Local files -> raw rows by position: .jsonl, .json, .parquet. Only what is read is decoded.

A table gives plain dicts and knows the location of each row, so that an error can name it. Leaves out what columns mean
(``formats.py``), how Arrow's values become Python's (``arrow.py``) and everything that is not on a local disk.
"""

from __future__ import annotations

import bisect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.data.arrow import Converter
from rlmodule.data.json_text import HALF_PAIR, is_unicode, load_json

RawRow = dict[str, Any]

BATCH_ROWS = 128  # rows turned into Python objects and tokens at a time; a token costs about 100 bytes while encoding
UTF8_MARK = b"\xef\xbb\xbf"


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


class JsonLinesTable(RowTable):
    """One JSON object a line. Opening it reads every line once and keeps only where each begins.

    A byte order mark, CRLF, blank lines and a missing last line break are fine.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        starts, numbers, columns = [], [], dict[str, None]()
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                begin = start + (len(UTF8_MARK) if number == 1 and line.startswith(UTF8_MARK) else 0)
                start += len(line)
                text = line.removeprefix(UTF8_MARK) if number == 1 else line
                if not text.strip():
                    continue
                columns.update(dict.fromkeys(_parse_object(text, f"{path}:{number}")))
                starts.append(begin)
                numbers.append(number)
        self.columns = tuple(columns)
        self._starts = np.array(starts, dtype=np.int64)  # bytes
        self._numbers = np.array(numbers, dtype=np.int64)  # lines, from 1, blank ones counted

    def __len__(self) -> int:
        return len(self._starts)

    def location(self, row: int) -> str:
        return f"{self.name}:{self._numbers[row]}"

    def select(self, rows: Sequence[int]) -> list[RawRow]:
        found = []
        with self._path.open("rb") as file:
            for row in rows:
                file.seek(int(self._starts[row]))
                found.append(_parse_object(file.readline(), self.location(row)))
        return found


class ParquetTable(RowTable):
    """A parquet file, one row group in memory at a time, as Arrow; Python objects are made of single batches and rows.

    Random access reads a whole row group, so a file for shuffled training is best written in groups of a few MB.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            # Without threads of Arrow's own: ranks may be forked after this.
            self._file = pq.ParquetFile(path, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                location=path, because=f"not a readable parquet file: {error}", fix="Write the file again"
            ) from None
        self.columns = tuple(self._file.schema_arrow.names)
        self._to_python = Converter(self._file.schema_arrow)
        groups = range(self._file.num_row_groups)
        sizes = [self._file.metadata.row_group(group).num_rows for group in groups]
        self._first = np.cumsum([0, *sizes])  # first row of each group, and the number of rows
        self._cached: tuple[int, pa.Table] | None = None

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
        for group in range(self._file.num_row_groups):  # one by one: buffers of a group are freed before the next
            part = {"row_groups": [group], "columns": list(columns), "use_threads": False}
            for batch in self._file.iter_batches(batch_size=BATCH_ROWS, **part):
                yield self._to_python(batch.to_pylist())

    def _group(self, group: int) -> pa.Table:
        if self._cached is None or self._cached[0] != group:
            self._cached = None  # free one group before the next is read
            self._cached = group, self._file.read_row_group(group, use_threads=False)
        return self._cached[1]


class TableChain:
    """Tables end to end: rows are counted over all of them.

    Args:
        tables: one per file.
    """

    def __init__(self, tables: Sequence[RowTable]) -> None:
        self.name = ", ".join(table.name for table in tables)
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


def open_files(paths: Sequence[str], key: str) -> list[RowTable]:
    """Open every file of ``paths``; a folder means the data files in it, sorted by name.

    Args:
        paths: files and folders on a local disk.
        key: the configuration key they come from, for errors.

    Raises:
        ConfigError: a path does not exist, or is of no known kind.
        DataError: a file holds no rows, or a line of it is not a row.
    """
    return [_open_file(path, key) for given in paths for path in _expand(given, key)]


def _open_file(path: Path, key: str) -> RowTable:
    if path.suffix not in _OPENERS:
        raise ConfigError(
            key=key,
            got=path,
            because=f"'{path.suffix}' is no known kind of data file",
            fix=f"Known: {', '.join(_OPENERS)}",
        )
    table = _OPENERS[path.suffix](path)
    if len(table) == 0:
        raise DataError(location=path, because="the file holds no rows", fix=f"Take it out of {key}, or write it again")
    return table


def _expand(given: str, key: str) -> list[Path]:
    path = Path(given).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _OPENERS)
        if not files:
            raise ConfigError(
                key=key, got=given, because="the folder holds no data file", fix=f"Known kinds: {', '.join(_OPENERS)}"
            )
        return files
    if not path.is_file():
        raise ConfigError(key=key, got=given, because="no such file or folder here", fix="Give a path on a local disk")
    return [path]


def _open_json(path: Path) -> RowTable:
    content = path.read_bytes().removeprefix(UTF8_MARK)
    if not content.lstrip().startswith(b"["):
        return JsonLinesTable(path)  # many tools write lines under this name as well
    rows = _parse(content, str(path), json.loads)
    for number, row in enumerate(rows, start=1):
        _check_object(row, f"{path}:{number}")
        if b"\\u" in content and not is_unicode(row):
            raise DataError(location=f"{path}:{number}", because=HALF_PAIR, fix="Fix or delete it")
    return MemoryTable(str(path), rows)


_OPENERS = {".jsonl": JsonLinesTable, ".json": _open_json, ".parquet": ParquetTable}


def _parse_object(line: bytes, location: str) -> RawRow:
    row = _parse(line, location)
    _check_object(row, location)
    return row  # type: ignore[no-any-return]


def _check_object(row: object, location: str) -> None:
    if not isinstance(row, dict):
        raise DataError(
            location=location,
            because=f"a row must be a JSON object, this is of type {type(row).__name__}",
            fix="Fix it",
        )


def _parse(content: bytes, location: str, load: Callable[[str], Any] = load_json) -> Any:
    try:
        return load(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        because = f"byte {error.start + 1} (0x{content[error.start]:02x}) is not valid UTF-8"
        raise DataError(location=location, because=because, fix="Save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        raise DataError(
            location=location, because=f"not valid JSON: {error.msg} at {where}", fix="Fix or delete it"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nesting just as deep
        raise DataError(
            location=location, because=f"JSON that cannot be read: {error}", fix="Fix or delete it"
        ) from None
