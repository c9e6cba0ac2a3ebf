"""Which column of a data file means what, for the formats of several projects, which are a table and not code.

Leaves out files (``files.py``) and the rows themselves (``row.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlmodule.core.errors import DataError
from rlmodule.data.tables import RowTable


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
    "sharegpt": Format(
        prompt=("conversations", "conversation"),
        answer=("answer",),
        source=("source",),
        completion=(),
        marks=(frozenset({"conversations"}), frozenset({"conversation"})),
    ),
    "openrlhf": Format(
        prompt=("input",),
        answer=("label", "answer"),
        source=("datasource",),
        completion=("output",),
        marks=(frozenset({"input"}),),
    ),
    "math": Format(
        prompt=("problem",),
        answer=("answer", "expected_answer"),
        source=("source",),
        completion=("solution", "generated_solution"),
        marks=(frozenset({"problem"}),),
    ),
}
# Columns of what a model of texts cannot read, in the files of several projects.
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
# Of files of pairs, which no project's name stands for: a prompt, the context of an instruction, and what goes with it.
PREFERENCES = Format(
    prompt=("prompt", "question", "instruction", "query", "input", "messages", "conversations"),
    context=("input",),
    answer=(),
    source=(),
    completion=(),
    marks=(),
)


@dataclass(frozen=True)
class ColumnKeys:
    """Columns named by the user; they win over what the format says, and must exist.

    Empty: as the format says. None, for system and tools: such a column is not read. ``answer_after`` and
    ``turn_marks`` are ``data``'s keys of that name.
    """

    prompt: str = ""
    answer: str = ""
    source: str = ""
    completion: str = ""
    system: str | None = ""
    tools: str | None = ""
    answer_after: str = ""
    turn_marks: Mapping[str, str] = field(default_factory=dict)


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
    answer_after: str = ""
    turn_marks: Mapping[str, str] = field(default_factory=dict)
    media: tuple[str, ...] = ()  # of images and the like, which rows must leave empty

    @property
    def of_prompt(self) -> list[str]:
        """Columns of the file that the prompt is made of."""
        named = (self.prompt, self.context, self.system, self.tools, *self.required, *self.media)
        return sorted({top_level(column) for column in named if column})

    def describe(self, roles: Sequence[str], present: Sequence[str], others: str) -> str:
        """For the run's plan: what is read as what, and what the other columns are for.

        Args:
            roles: names of the fields that are read.
            present: every column of the file.
            others: what becomes of columns that are not read, in words.
        """
        named = [(role, getattr(self, role)) for role in roles]
        behind = {"answer": f" behind {self.answer_after}"} if self.answer_after else {}
        read = [f"{role} = {column}{behind.get(role, '')}" for role, column in named if column]
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
        answer_after=keys.answer_after,
        turn_marks=keys.turn_marks,
        media=tuple(column for column in MEDIA if column in table.columns and column not in named),
    )


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
