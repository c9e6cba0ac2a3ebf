"""Columns of data files of several projects -> one kind of row. Formats are a table, not code.

Leaves out reading (``files.py``) and tokens (``chat.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmodule.core.errors import DataError
from rlmodule.core.text import as_text
from rlmodule.data.files import RawRow, RowTable
from rlmodule.data.json_text import load_json
from rlmodule.data.messages import ChatError, Tools, Turns, as_turns, check_messages, is_assistant, read_tools


@dataclass(frozen=True)
class Row:
    """One row, whatever its file called the columns.

    Args:
        prompt: a text, or turns.
        answer: ground truth as text; numbers are written out, lists and mappings become JSON.
        source: name of the data source, or the empty string.
        completion: a demonstrated response (a text or turns), or None.
        meta: the other columns, unchanged; turns of the prompt are kept as ``messages``.
        tools: descriptions of the functions that the assistant may call, or None.
        answer_value: the answer with the type it has in the file.
    """

    prompt: Turns
    answer: str | None = None
    source: str = ""
    completion: Turns | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools | None = None
    answer_value: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Format:
    """Names of columns; of several candidates the first that exists is read. ``a.b`` is entry b of the mapping in a.

    Args:
        prompt, context, answer, source, completion, system, tools: candidates. ``context`` is appended to the prompt
            after a line break.
        marks: a file with all columns of one of these sets is taken to have this format.
        meta: column with more columns inside, as a mapping or as JSON text.
    """

    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    source: tuple[str, ...]
    completion: tuple[str, ...]
    marks: tuple[frozenset[str], ...]
    meta: str = "meta"
    context: tuple[str, ...] = ()
    system: tuple[str, ...] = ("system", "system_prompt")
    tools: tuple[str, ...] = ("tools",)


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
    "alpaca": Format(
        prompt=("instruction",),
        context=("input", "context"),
        answer=("answer",),
        source=("source",),
        completion=("output", "response"),
        marks=(frozenset({"instruction"}),),
    ),
    "openrlhf": Format(
        prompt=("input",),
        answer=("label", "answer"),
        source=("datasource",),
        completion=("output",),
        marks=(frozenset({"input"}),),
    ),
}
# Of files of pairs, which no project's name stands for: a prompt, the context of an instruction, and what goes with it.
PREFERENCES = Format(
    prompt=("prompt", "question", "instruction", "query", "input", "messages"),
    context=("input",),
    answer=(),
    source=(),
    completion=(),
    marks=(),
)


@dataclass(frozen=True)
class ColumnKeys:
    """Columns named by the user; they win over what the format says, and must exist.

    Empty: as the format says. None, for system and tools: such a column is not read.
    """

    prompt: str = ""
    answer: str = ""
    source: str = ""
    completion: str = ""
    system: str | None = ""
    tools: str | None = ""


@dataclass(frozen=True)
class Columns:
    """Which columns of one file to read; None where it has none. ``required`` must be there in every row."""

    prompt: str | None
    answer: str | None
    source: str | None
    completion: str | None
    meta: str
    required: frozenset[str]
    context: str | None = None
    system: str | None = None
    tools: str | None = None

    @property
    def of_prompt(self) -> list[str]:
        """Columns of the file that the prompt is made of."""
        named = (self.prompt, self.context, self.system, self.tools, *self.required)
        return sorted({top_level(column) for column in named if column})

    def describe(self, roles: Sequence[str], present: Sequence[str], others: str) -> str:
        """For the run's plan: what is read as what, and what the other columns are for.

        Args:
            roles: names of the fields that are read.
            present: every column of the file.
            others: what becomes of columns that are not read, in words.
        """
        named = [(role, getattr(self, role)) for role in roles]
        read = [f"{role} = {column}" for role, column in named if column]
        used = {top_level(column) for _, column in named if column}
        rest = [column for column in present if column not in used]
        return ", ".join(read) + (f"; {others}: {', '.join(rest)}" if rest else "")


def choose_columns(table: RowTable, name: str, keys: ColumnKeys) -> Columns:
    """Decide what the columns of ``table`` mean.

    Args:
        table: the rows.
        name: a key of FORMATS, or ``auto`` to decide by the columns.
        keys: columns named by the user.

    Raises:
        DataError: a column that is needed is not in the file; names those that are.
    """
    known = _recognise(table.columns) if name == "auto" else name
    chosen = FORMATS[known or "rlmodule"]
    columns = _columns(table, chosen, keys)
    if columns.prompt is None:
        wanted = " or ".join(f"'{column}'" for column in chosen.prompt)
        raise DataError(
            location=table.name,
            because=f"no column {wanted} to take the prompt from; its columns are {', '.join(table.columns)}",
            fix=f"Set data.prompt_key, or data.format to one of {', '.join(FORMATS)}",
        )
    return columns


def choose_preference_columns(table: RowTable, keys: ColumnKeys) -> Columns:
    """Decide what the columns of a file of pairs mean; a prompt column may be missing.

    Raises:
        DataError: a column named by the user is not in the file.
    """
    return _columns(table, PREFERENCES, keys, required=frozenset())


def _columns(table: RowTable, chosen: Format, keys: ColumnKeys, required: frozenset[str] | None = None) -> Columns:
    prompt = _choose(table, keys.prompt, chosen.prompt, "data.prompt_key")
    context = None if keys.prompt else _choose(table, "", chosen.context, "")
    named = frozenset({prompt or "", keys.answer, keys.completion} - {""})
    return Columns(
        prompt=prompt,
        context=context if prompt == "instruction" else None,
        answer=_choose(table, keys.answer, chosen.answer, "data.answer_key"),
        source=_choose(table, keys.source, chosen.source, "data.source_key"),
        completion=_choose(table, keys.completion, chosen.completion, "data.completion_key"),
        system=_choose(table, keys.system, chosen.system, "data.system_key"),
        tools=_choose(table, keys.tools, chosen.tools, "data.tools_key"),
        meta=chosen.meta,
        required=named if required is None else required,
    )


def read_row(raw: RawRow, columns: Columns, location: str) -> Row:
    """One raw row in the fields of ``Row``.

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
    prompt = read_prompt(raw, columns, location)
    assert prompt is not None, "the prompt is required"
    completion = _look_up(raw, columns.completion)
    meta = {name: value for name, value in raw.items() if name not in (columns.prompt, columns.meta)}
    meta |= _read_meta(raw.get(columns.meta), columns.meta, location)
    if not isinstance(prompt, str):
        meta["messages"] = prompt
    answer = _look_up(raw, columns.answer)
    return Row(
        prompt=prompt,
        answer=None if answer == [] else as_text(answer),
        source=as_text(_look_up(raw, columns.source)) or "",
        completion=None if completion is None else read_turns(completion, str(columns.completion), location),
        meta=meta,
        tools=read_row_tools(raw, columns, location),
        answer_value=answer,
    )


def read_prompt(raw: RawRow, columns: Columns, location: str) -> Turns | None:
    """The prompt of a row with its context and its system turn; None where the row has no prompt.

    Raises:
        DataError: a value is not what it should be, or there are two system turns.
    """
    value = _look_up(raw, columns.prompt)
    if value is None:
        return None
    prompt = read_turns(value, str(columns.prompt), location)
    context = _look_up(raw, columns.context)
    if context and isinstance(prompt, str):
        prompt = f"{prompt}\n{context}" if prompt else str(context)
    return with_system_turn(prompt, raw, columns, location)


def with_system_turn(turns: Turns, raw: RawRow, columns: Columns, location: str) -> Turns:
    """``turns`` behind the system turn that the row has in a column of its own, if it has one.

    Raises:
        DataError: it is no text, or the turns begin with another system turn.
    """
    system = _look_up(raw, columns.system)
    if not system:
        return turns
    own = as_turns(turns)
    first = own[0].get("content") if own and own[0]["role"] == "system" else None
    if not isinstance(system, str) or first not in (None, system):
        because = "and the conversation begins with another system turn" if first else "which is no text"
        raise DataError(
            location=location,
            because=f"the row has a '{columns.system}', {because}",
            fix="Fix the row, or use data.system_key=null to leave the column out",
        )
    return own if first else [{"role": "system", "content": system}, *own]


def read_row_tools(raw: RawRow, columns: Columns, location: str) -> Tools | None:
    """The tools of a row; None where it has none.

    Raises:
        DataError: they are no list of descriptions.
    """
    value = _look_up(raw, columns.tools)
    if not value:
        return None
    try:
        return read_tools(value) or None
    except ChatError as error:
        raise DataError(
            location=location,
            because=f"column '{columns.tools}': {error}",
            fix="Fix the row, or use data.tools_key=null to leave the column out",
        ) from None


def read_turns(value: Any, column: str, location: str) -> Turns:
    """A text or turns of a file, checked.

    Args:
        value: the entry.
        column: its name, for errors.
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
    # A key that is null is one that the turn does not have; templates ask whether a key is there.
    return [{name: entry for name, entry in turn.items() if entry is not None} for turn in value]


def ends_with_assistant(turns: Turns | None) -> bool:
    """Whether these are turns, and the last one is the assistant's."""
    return bool(turns) and not isinstance(turns, str) and turns is not None and is_assistant(turns[-1])


def top_level(column: str) -> str:
    """The file's own column that holds ``column``."""
    return column.partition(".")[0]


def _recognise(columns: Sequence[str]) -> str | None:
    present = set(columns)
    return next((name for name, known in FORMATS.items() if any(marks <= present for marks in known.marks)), None)


def _choose(table: RowTable, wanted: str | None, candidates: Sequence[str], key: str) -> str | None:
    def exists(column: str) -> bool:
        return column in table.columns or top_level(column) in table.columns

    if wanted is None:
        return None
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
            value = load_json(value)
        except ValueError as error:
            raise DataError(
                location=location, because=f"column '{column}' is not JSON: {error}", fix="Fix it"
            ) from None
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else {column: value}
