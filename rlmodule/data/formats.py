"""What the columns of other projects' data files are called -> one kind of row. Formats are a table, not code.

Leaves out reading (``files.py``) and tokens (``chat.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmodule.core.errors import DataError
from rlmodule.data.chat import ChatError, Turns, check_messages
from rlmodule.data.files import RawRow, RowTable


@dataclass(frozen=True)
class Row:
    """One row in our own words.

    Args:
        prompt: a text, or turns.
        answer: ground truth as text; numbers are written out, lists and mappings become JSON.
        source: name of the data source, or the empty string.
        completion: a demonstrated response (a text or turns), or None.
        meta: the columns besides the prompt as they stood; turns are kept as ``messages``.
    """

    prompt: Turns
    answer: str | None = None
    source: str = ""
    completion: Turns | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """Column names; of several candidates the first that exists counts. ``a.b`` is entry b of the mapping in column a.

    Args:
        prompt, answer, source, completion: candidates.
        marks: a file with all columns of one of these sets is taken for this format.
        meta: column with more columns inside, as a mapping or as JSON text.
    """

    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    source: tuple[str, ...]
    completion: tuple[str, ...]
    marks: tuple[frozenset[str], ...]
    meta: str = "meta"


# Order matters: the first format with its marks in the file is taken.
FORMATS: dict[str, Format] = {
    "verl": Format(
        prompt=("prompt",),
        answer=("reward_model.ground_truth",),
        source=("data_source",),
        completion=("response",),
        marks=(frozenset({"reward_model", "data_source"}),),
        meta="extra_info",
    ),
    "verifiers": Format(
        prompt=("prompt", "question"),
        answer=("answer",),
        source=("task",),
        completion=("completion",),
        marks=(frozenset({"question"}), frozenset({"prompt", "info"})),
        meta="info",
    ),
    "openrlhf": Format(
        prompt=("input",),
        answer=("label", "answer"),
        source=("datasource",),
        completion=("output",),
        marks=(frozenset({"input"}),),
    ),
    "rlmodule": Format(
        prompt=("prompt", "messages"),
        answer=("answer",),
        source=("source",),
        completion=("completion",),
        marks=(frozenset({"prompt", "source"}), frozenset({"prompt", "meta"}), frozenset({"messages", "answer"})),
    ),
    "trl": Format(
        prompt=("prompt", "messages"),
        answer=("solution", "answer", "ground_truth"),
        source=("task",),
        completion=("completion",),
        marks=(frozenset({"prompt"}), frozenset({"messages"})),
    ),
}


@dataclass(frozen=True)
class ColumnKeys:
    """Columns named by the user; they win over what the format says, and must exist. Empty: as the format says."""

    prompt: str = ""
    answer: str = ""
    source: str = ""
    completion: str = ""


@dataclass(frozen=True)
class Columns:
    """Which columns of one file to read; None where it has none. ``required`` must be there in every row."""

    prompt: str
    answer: str | None
    source: str | None
    completion: str | None
    meta: str
    required: frozenset[str]


def choose_columns(table: RowTable, name: str, keys: ColumnKeys) -> Columns:
    """Decide what the columns of ``table`` mean.

    Args:
        table: the rows.
        name: a key of FORMATS, or ``auto`` to judge by the columns.
        keys: columns named by the user.

    Raises:
        DataError: a column that is needed is not in the file; names those that are.
    """
    known = _recognise(table.columns) if name == "auto" else name
    chosen = FORMATS[known or "rlmodule"]
    prompt = _choose(table, keys.prompt, chosen.prompt, "data.prompt_key")
    if prompt is None:
        wanted = " or ".join(f"'{column}'" for column in chosen.prompt)
        raise DataError(
            location=table.name,
            because=f"no column {wanted} to take the prompt from; its columns are {', '.join(table.columns)}",
            fix=f"Set data.prompt_key, or data.format to one of {', '.join(FORMATS)}",
        )
    return Columns(
        prompt=prompt,
        answer=_choose(table, keys.answer, chosen.answer, "data.answer_key"),
        source=_choose(table, keys.source, chosen.source, "data.source_key"),
        completion=_choose(table, keys.completion, chosen.completion, "data.completion_key"),
        meta=chosen.meta,
        required=frozenset({prompt, keys.answer, keys.completion} - {""}),
    )


def read_row(raw: RawRow, columns: Columns, location: str) -> Row:
    """One raw row in our own words.

    Args:
        raw: as the file has it; only columns that are read need to be there.
        columns: what they mean.
        location: ``file:line``, for errors.

    Raises:
        DataError: a required value is missing, or is not what it should be.
    """
    for column in columns.required:
        if _look_up(raw, column) is None:
            raise DataError(
                location=location,
                because=f"the row has no '{column}'; its columns are {', '.join(raw)}",
                fix="Fill it in, or delete the row",
            )
    prompt = read_turns(_look_up(raw, columns.prompt), columns.prompt, location)
    completion = _look_up(raw, columns.completion)
    meta = {name: value for name, value in raw.items() if name not in (columns.prompt, columns.meta)}
    meta |= _read_meta(raw.get(columns.meta), columns.meta, location)
    if not isinstance(prompt, str):
        meta["messages"] = prompt
    return Row(
        prompt=prompt,
        answer=_as_text(_look_up(raw, columns.answer)),
        source=_as_text(_look_up(raw, columns.source)) or "",
        completion=None if completion is None else read_turns(completion, str(columns.completion), location),
        meta=meta,
    )


def read_turns(value: Any, column: str, location: str) -> Turns:
    """A text or turns as a file has them, checked.

    Args:
        value: the entry.
        column: where it stands, for errors.
        location: ``file:line``, for errors.

    Raises:
        DataError: it is neither.
    """
    if isinstance(value, str):
        return value
    try:
        check_messages(value)
    except ChatError as error:
        raise DataError(location=location, because=f"column '{column}': {error}", fix="Fix or delete the row") from None
    # A parquet struct has every key in every turn, None where a turn has none; templates ask whether a key is there.
    return [{name: entry for name, entry in turn.items() if entry is not None} for turn in value]


def top_level(column: str) -> str:
    """The file's own column that holds ``column``."""
    return column.partition(".")[0]


def _recognise(columns: Sequence[str]) -> str | None:
    present = set(columns)
    return next((name for name, known in FORMATS.items() if any(marks <= present for marks in known.marks)), None)


def _choose(table: RowTable, wanted: str, candidates: Sequence[str], key: str) -> str | None:
    def exists(column: str) -> bool:
        return column in table.columns or top_level(column) in table.columns

    if wanted and not exists(wanted):
        raise DataError(
            location=table.name,
            because=f"there is no column '{wanted}'; its columns are {', '.join(table.columns)}",
            fix=f"Set {key} to one of them",
        )
    return wanted or next((column for column in candidates if exists(column)), None)


def _look_up(raw: RawRow, column: str | None) -> Any:
    if column is None or column in raw:
        return raw.get(column) if column else None
    value: Any = raw
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _read_meta(value: Any, column: str, location: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(
                location=location, because=f"column '{column}' is not JSON: {error}", fix="Fix it"
            ) from None
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else {column: value}


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
