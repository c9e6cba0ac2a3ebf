"""Raw rows -> ``Row``, the one kind of row that the rest knows, checked with their ``file:line``.

Leaves out which column means what (``formats.py``) and tokens (``chat.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlmodule.core.errors import DataError
from rlmodule.core.text import as_text
from rlmodule.data.answers import find_answer
from rlmodule.data.formats import Columns
from rlmodule.data.json_text import load_json
from rlmodule.data.messages import ChatError, Tools, Turns, as_turns, is_assistant, prompt_text, read_tools
from rlmodule.data.tables import RawRow
from rlmodule.data.turns import read_conversation


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
        if look_up(raw, column) is None:
            raise DataError(
                location=location,
                because=f"the row has no '{column}'; its columns are {', '.join(raw)}",
                fix="Fill it in, or delete the row",
            )
    prompt = read_prompt(raw, columns, location)
    assert prompt is not None, "the prompt is required"
    completion = look_up(raw, columns.completion)
    meta = {name: value for name, value in raw.items() if name not in (columns.prompt, columns.meta)}
    meta |= _read_meta(raw.get(columns.meta), columns.meta, location)
    if not isinstance(prompt, str):
        meta["messages"] = prompt
    answer = _without_nulls(_answer(raw, columns, location))
    return Row(
        prompt=prompt,
        answer=None if answer == [] else as_text(answer),
        source=as_text(look_up(raw, columns.source)) or "",
        completion=None
        if completion is None
        else read_turns(completion, str(columns.completion), location, columns.turn_marks),
        meta=meta,
        tools=read_row_tools(raw, columns, location),
        answer_value=answer,
    )


def read_prompt(raw: RawRow, columns: Columns, location: str) -> Turns | None:
    """The prompt of a row with its context and its system turn; None where the row has no prompt.

    Raises:
        DataError: a value is not what it should be, or there are two system turns.
    """
    value = look_up(raw, columns.prompt)
    if value is None:
        return None
    prompt = read_turns(value, str(columns.prompt), location, columns.turn_marks)
    _check_no_media(raw, prompt, columns, location)
    context = look_up(raw, columns.context)
    if context and isinstance(prompt, str):
        prompt = f"{prompt}\n{context}" if prompt else str(context)
    return with_system_turn(prompt, raw, columns, location)


def _check_no_media(raw: RawRow, prompt: Turns, columns: Columns, location: str) -> None:
    """Refuse images and the like; a text may also be the name of a container, unless the prompt has a place for it."""
    for column in columns.media:
        value, mark = raw.get(column), f"<{column.removesuffix('s')}>"
        if value and (not isinstance(value, str) or mark in prompt_text(prompt)):
            raise DataError(
                location=location,
                because=f"the row has something under '{column}', and models read nothing but text here",
                fix="Take the column out of the file where the text is enough, or delete the row",
            )


def with_system_turn(turns: Turns, raw: RawRow, columns: Columns, location: str) -> Turns:
    """``turns`` behind the system turn that the row has in a column of its own, if it has one.

    Raises:
        DataError: it is no text, or the turns begin with another system turn.
    """
    system = look_up(raw, columns.system)
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
    value = look_up(raw, columns.tools)
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


def read_turns(value: Any, column: str, location: str, marks: Mapping[str, str]) -> Turns:
    """A text or turns of a file, checked.

    Args:
        value: the entry.
        column: its name, for errors.
        location: ``file:line``, for errors.
        marks: of a transcript, see ``read_conversation``.

    Raises:
        DataError: it is neither.
    """
    try:
        return read_conversation(value, marks)
    except ChatError as error:
        raise DataError(location=location, because=f"column '{column}': {error}", fix="Fix or delete the row") from None


def ends_with_assistant(turns: Turns | None) -> bool:
    """Whether these are turns, and the last one is the assistant's."""
    return bool(turns) and not isinstance(turns, str) and turns is not None and is_assistant(turns[-1])


def _answer(raw: RawRow, columns: Columns, location: str) -> Any:
    """The ground truth, with the type it has in the file; out of more text where ``data.answer_after`` says so."""
    answer = look_up(raw, columns.answer)
    if not columns.answer_after or answer is None:
        return answer
    found = find_answer(answer, columns.answer_after) if isinstance(answer, str) else None
    if not found:
        raise DataError(
            location=location,
            because=f"column '{columns.answer}' has no {columns.answer_after!r} with an answer behind it",
            fix="Fix or delete the row, or use data.answer_after='' to take the whole column",
        )
    return found


def _without_nulls(answer: Any) -> Any:
    """Several right answers without those that are none."""
    return [entry for entry in answer if entry is not None] if isinstance(answer, list) else answer


def look_up(raw: RawRow, column: str | None) -> Any:
    """The entry of a column; None where there is none. ``a.b`` is entry b of the mapping (or its JSON) in a."""
    if column is None or column in raw:
        return raw.get(column) if column else None
    value: Any = raw
    for part in column.split("."):
        value = _opened(value).get(part)
    return value


def _opened(value: Any) -> Mapping[str, Any]:
    """A mapping, which may be written as JSON text; empty for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError):
            value = load_json(value)
    return value if isinstance(value, Mapping) else {}


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
