"""JSON files -> rows: one object a line, or a list of objects, which cannot be read in part."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any, BinaryIO

from rlmodule.core.errors import DataError
from rlmodule.data.json_text import HALF_PAIR, is_unicode, load_json
from rlmodule.data.readers.content import UTF8_MARK, Content
from rlmodule.data.readers.indexed import IndexedTable
from rlmodule.data.tables import MemoryTable, RawRow, RowTable


class JsonLinesTable(IndexedTable):
    """One JSON object a line. Opening it reads every line once and keeps only where each begins.

    A byte order mark (of every file that was joined into this one), CRLF, blank lines and a missing last line break are
    fine.

    Raises:
        DataError: ``file:line`` of one that is no JSON object.
    """

    def __init__(self, content: Content) -> None:
        starts, numbers, columns = array("q"), array("q"), dict[str, None]()
        start = 0
        with content.open() as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(UTF8_MARK)
                begin = start + len(line) - len(text)
                start += len(line)
                if not text.strip():
                    continue
                columns.update(dict.fromkeys(_parse_object(text, f"{content.path}:{number}")))
                starts.append(begin)
                numbers.append(number)
        super().__init__(content, tuple(columns), starts, numbers)

    def read_row(self, file: BinaryIO, location: str) -> RawRow:
        return _parse_object(file.readline(), location)


def open_json(content: Content) -> RowTable:
    """A list of objects, all in memory; or lines, which many tools write under this name as well.

    Raises:
        DataError: ``file:line``, or ``file:number`` of the object.
    """
    with content.open() as file:
        start = file.read(1 << 16).removeprefix(UTF8_MARK).lstrip()
    if not start.startswith(b"["):
        try:
            return JsonLinesTable(content)
        except DataError:
            _check_not_one_object(content)
            raise
    with content.open() as file:
        text = file.read().removeprefix(UTF8_MARK)
    rows = _parse(text, str(content.path), json.loads)
    for number, row in enumerate(rows, start=1):
        _check_object(row, f"{content.path}:{number}")
        if b"\\u" in text and not is_unicode(row):
            raise DataError(location=f"{content.path}:{number}", because=HALF_PAIR, fix="Fix or delete it")
    return MemoryTable(str(content.path), rows)


def _check_not_one_object(content: Content) -> None:
    """Refuse a file that is JSON, and neither a list nor one object a line.

    Raises:
        DataError: says which of its keys hold lists.
    """
    with content.open() as file:
        try:
            whole = load_json(file.read().removeprefix(UTF8_MARK).decode("utf-8"))
        except ValueError:
            return
    lists = [key for key, value in whole.items() if isinstance(value, list)] if isinstance(whole, dict) else []
    raise DataError(
        location=content.path,
        because="it is a single JSON object over several lines"
        + (f", with lists under {', '.join(lists)}" if lists else ""),
        fix="Write the rows as a list of objects, or one object a line",
    )


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
