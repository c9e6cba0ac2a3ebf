"""Rows of an environment or of files -> prompts with token ids, checked before anything else is loaded.

Every row is read and measured once at the start; after that a prompt is made when it is needed, so memory holds
lengths, not texts. Leaves out the order they come in (``stream.py``) and responses (``demonstrations.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError, DataError
from rlmodule.core.types import Prompt
from rlmodule.data.chat import ChatError, ChatFormat, prompt_text
from rlmodule.data.files import RowTable, TableChain, open_files
from rlmodule.data.formats import FORMATS, ColumnKeys, Row, choose_columns, read_row
from rlmodule.data.tokens import Ids
from rlmodule.data.val_sets import check_val_files, sets_of

SPLITS = ("train", "test")
READ_AT_ONCE = 4096  # rows


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from, and what is refused."""

    train_files: list[str] = field(default_factory=list)  # local .jsonl, .json, .parquet files, or folders of them
    val_files: Any = None  # likewise, or a mapping of set names to such lists; None: no validation
    rollouts: str | None = (
        None  # file or folder of stored responses to train from; prompts are then for validation only
    )
    format: str = (
        "auto"  # column names of: rlmodule, verl, trl, alpaca, openrlhf, verifiers; auto decides for each file
    )
    prompt_key: str = ""  # column of the prompt (a text or turns); empty: as the format says. a.b reaches into a
    answer_key: str = ""  # column of the ground truth
    source_key: str = ""  # column of the data source's name
    completion_key: str = ""  # column of the demonstrated response, for supervised training
    system_key: str | None = ""  # column of the system turn; empty: as the format says; None: such a column is not read
    tools_key: str | None = ""  # column of the tools the assistant may call (a list or JSON text); likewise
    chosen_key: str = "chosen"  # column of the better response, for preferences
    rejected_key: str = "rejected"  # column of the worse response, for preferences
    apply_chat_template: bool = True  # False: prompts are raw text
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # variables for the template
    system_prompt: str = ""  # put in front of conversations that have no system turn; empty: none
    max_prompt_length: int = 1024  # tokens, chat template included
    max_response_length: int = 1024  # tokens; what rollout.max_response_length is unless it is set itself
    warm_start_steps: int = 0  # what warm_start.steps is unless it is set itself
    overlong_prompt: str = "error"  # what becomes of longer ones: error, filter, truncate_left
    val_max_rows: int | None = None  # rows of each validation set to use, the first ones; None: all
    shuffle: bool = True  # a new order in every pass; False: the order of the files

    def __post_init__(self) -> None:
        check_val_files(self.val_files)
        one_of("format", self.format, ["auto", *FORMATS])
        one_of("overlong_prompt", self.overlong_prompt, ["error", "filter", "truncate_left"])
        at_least("max_prompt_length", self.max_prompt_length, 1)
        at_least("max_response_length", self.max_response_length, 1)
        at_least("warm_start_steps", self.warm_start_steps, 0)
        if self.val_max_rows is not None:
            at_least("val_max_rows", self.val_max_rows, 1)
        if self.system_prompt and not self.apply_chat_template:
            raise ConfigError(
                key="system_prompt",
                got=self.system_prompt,
                because="apply_chat_template is false, and raw text has no system turn",
                fix="Use data.system_prompt='', or data.apply_chat_template=true",
            )

    def files_of(self, split: str) -> tuple[list[str], str, int | None]:
        """Files of ``train`` or ``test``, the key that names them, and how many of their rows to use (None: all)."""
        assert split in SPLITS, f"no split is called {split}"
        if split == "train":
            return self.train_files, "data.train_files", None
        return [file for files in self.val_sets.values() for file in files], "data.val_files", self.val_max_rows

    @property
    def val_sets(self) -> dict[str, list[str]]:
        """Name of each validation set -> its files; a list of files is one set, whose name is empty."""
        return sets_of(self.val_files)

    @property
    def column_keys(self) -> ColumnKeys:
        """The columns that the user names."""
        return ColumnKeys(
            self.prompt_key, self.answer_key, self.source_key, self.completion_key, self.system_key, self.tools_key
        )

    def chat_format(self, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        """How prompts become tokens."""
        return ChatFormat(tokenizer, self.apply_chat_template, self.chat_template_args, self.system_prompt)


class RowSource:
    """The rows of one split over all its files; columns are checked when it is made.

    Args:
        tables: one per file.
        format: a name in FORMATS, or ``auto``.
        keys: columns named by the user.
        limit: use no more than the first rows; None uses all.

    Raises:
        DataError: a file lacks a column.
    """

    def __init__(self, tables: Sequence[RowTable], format: str, keys: ColumnKeys, limit: int | None = None) -> None:
        self._chain = TableChain(tables)
        self.name = self._chain.name
        self._columns = tuple(choose_columns(table, format, keys) for table in tables)
        self._size = min(len(self._chain), limit or len(self._chain))

    def __len__(self) -> int:
        return self._size

    def location(self, row: int) -> str:
        """``file:line`` of a row."""
        return self._chain.location(row)

    def select(self, rows: Sequence[int]) -> list[Row]:
        """The rows of these positions, in the same order; each file is visited once."""
        found = zip(rows, self._chain.select(rows), strict=True)
        return [read_row(raw, self._columns[table], self.location(row)) for row, (table, raw) in found]

    def prompts(self) -> Iterator[list[Row]]:
        """All rows in order, a batch at a time, with no more than their prompts and tools."""
        left = len(self)
        for table, columns in zip(self._chain.tables, self._columns, strict=True):
            inside = 0
            for batch in table.batches(columns.of_prompt):
                kept = batch[:left]
                yield [read_row(raw, columns, table.location(inside + i)) for i, raw in enumerate(kept)]
                inside += len(kept)
                left -= len(kept)
                if not left:
                    return

    def check_completions(self) -> None:
        """Every file has a column with responses, or conversations that hold them.

        Raises:
            DataError: names the file and its columns.
        """
        for table, columns in zip(self._chain.tables, self._columns, strict=True):
            [first] = table.select([0])
            if columns.completion is None and isinstance(read_row(first, columns, table.location(0)).prompt, str):
                raise DataError(
                    location=table.location(0),
                    because=f"no completion column to learn from; the columns are {', '.join(table.columns)}",
                    fix="Set data.completion_key to the one with the response",
                )

    def describe_columns(self, roles: Sequence[str], others: str) -> str:
        """For the run's plan: which column is read as what; see ``Columns.describe``."""
        tables = zip(self._chain.tables, self._columns, strict=True)
        lines = dict.fromkeys(columns.describe(roles, table.columns, others) for table, columns in tables)
        return " | ".join(lines)

    @property
    def has_tools(self) -> bool:
        """Whether a file has a column with tools that is read."""
        return any(columns.tools for columns in self._columns)


def open_rows(config: DataConfig, split: str, table: RowTable | None = None) -> RowSource:
    """The rows of ``split`` with their columns checked; needs no tokenizer.

    Args:
        config: where to look.
        split: ``train`` or ``test``; the rows of the latter come from ``val_files``.
        table: the rows of an environment, in place of files.

    Raises:
        ConfigError: a file is missing.
        DataError: a file has no rows, a bad line, or lacks a column.
    """
    files, key, limit = config.files_of(split)
    if table is not None:
        return RowSource([table], "rlmodule", ColumnKeys(), limit)
    assert files, f"{key} is empty; ask has_validation first"
    return RowSource(open_files(files, key), config.format, config.column_keys, limit)


class PromptTable(Sequence[Prompt]):
    """Prompts by position, encoded when they are needed.

    Args:
        rows: where they come from.
        chat: how they become tokens.
        kept: [P] int64, positions in ``rows`` of the prompts in use.
        lengths: [P] int32, tokens of each, before truncation.
        limit: prompts longer than this lose tokens on the left.
        largest_ids: [P] int32, the largest token id of each, before truncation.
    """

    def __init__(
        self,
        rows: RowSource,
        chat: ChatFormat,
        kept: NDArray[np.int64],
        lengths: NDArray[np.int32],
        limit: int,
        largest_ids: NDArray[np.int32],
    ) -> None:
        self._rows, self._chat, self._kept, self._limit = rows, chat, kept, limit
        self._largest_ids = largest_ids
        self.lengths = np.minimum(lengths, limit)
        self.num_filtered = len(rows) - len(kept)
        self.num_truncated = int((lengths > limit).sum())

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        return self.select([range(len(self))[index]])[0]

    def select(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of these positions, in the same order; cheaper than one by one.

        ``Prompt.row`` is the position before filtering, over all files of the split: what ``location`` understands.
        """
        positions = [int(self._kept[index]) for index in indices]
        rows = self._rows.select(positions)
        ids = self._chat.encode_prompts([row.prompt for row in rows], [row.tools for row in rows])
        return [
            Prompt(
                row=position,
                ids=ids_of_row[-self._limit :],
                text=prompt_text(row.prompt),
                answer=row.answer,
                source=row.source,
                meta=row.meta,
                answer_value=row.answer_value,
                location=self.location(position),
            )
            for position, row, ids_of_row in zip(positions, rows, ids, strict=True)
        ]

    def check(self, missing_fields: Callable[[str | None, Mapping[str, Any]], str | None]) -> None:
        """Refuse the first prompt whose answers cannot be scored; see ``Reward.missing_fields``.

        Raises:
            DataError: ``file:line`` and what is missing.
        """
        for start in range(0, len(self), READ_AT_ONCE):
            positions = [int(position) for position in self._kept[start : start + READ_AT_ONCE]]
            for position, row in zip(positions, self._rows.select(positions), strict=True):
                missing = missing_fields(row.answer, row.meta)
                if missing is not None:
                    raise DataError(
                        location=self.location(position),
                        because=missing,
                        fix="Set data.answer_key to the column with the ground truth, fix the row, or choose another "
                        "reward",
                    )

    def check_ids(self, vocab_size: int) -> None:
        """Refuse the first prompt with a token that the model does not have.

        Raises:
            DataError: ``file:line``.
        """
        unknown = np.flatnonzero(self._largest_ids >= vocab_size)
        if len(unknown):
            position = int(self._kept[unknown[0]])
            raise unknown_token(self.location(position), int(self._largest_ids[unknown[0]]), vocab_size)

    def location(self, row: int) -> str:
        """``file:line`` of ``Prompt.row``."""
        return self._rows.location(row)

    def describe_columns(self) -> str:
        """For the run's plan: which column is read as what."""
        others = "for the reward alone"
        text = self._rows.describe_columns(("prompt", "context", "system", "tools", "answer", "source"), others)
        return text + tools_note(self._rows, self._chat)

    def describe(self) -> str:
        """One line for the run's plan."""
        text = f"{len(self)} prompts of {self._rows.name}, {self.lengths.min()} to {self.lengths.max()} tokens"
        text += f" (mean {self.lengths.mean():.1f})"
        if self.num_filtered:
            text += f", {self.num_filtered} longer ones filtered out"
        if self.num_truncated:
            text += f", {self.num_truncated} cut on the left"
        return text


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str, table: RowTable | None = None
) -> PromptTable:
    """Open, check and measure the prompts of ``split``.

    Args:
        config: where they are and what is refused.
        tokenizer: of the model.
        split: ``train`` or ``test``; the prompts of the latter come from ``val_files``.
        table: the rows of an environment, in place of files.

    Raises:
        ConfigError: a file is missing, or the tokenizer has no chat template.
        DataError: a row cannot be used, or none is left; the message has ``file:line``.
    """
    rows = open_rows(config, split, table)
    chat = config.chat_format(tokenizer)
    lengths, largest = _measure(rows, chat)
    kept = keep_by_length(lengths, config, rows.location)
    return PromptTable(rows, chat, kept, lengths[kept], config.max_prompt_length, largest[kept])


def tools_note(rows: RowSource, chat: ChatFormat) -> str:
    """For the run's plan: that tools are read and the template does not write them; else empty."""
    return " (the chat template does not write tools)" if rows.has_tools and not chat.renders_tools else ""


def unknown_token(location: str, token: int, vocab_size: int) -> DataError:
    """The error for a row with a token that the model does not have."""
    return DataError(
        location=location,
        because=f"it has the token id {token}, and the model knows ids 0 to {vocab_size - 1}",
        fix="Use the tokenizer of the model, or delete the row",
    )


def keep_by_length(lengths: NDArray[np.int32], config: DataConfig, location: Callable[[int], str]) -> NDArray[np.int64]:
    """Positions of the rows that stay in use under the rule ``overlong_prompt``.

    Args:
        lengths: [rows] tokens of each prompt, chat template included.
        config: the limit and the rule.
        location: row -> ``file:line``.

    Raises:
        DataError: a prompt is too long and the rule is ``error``; or nothing is left.
    """
    limit = config.max_prompt_length
    is_long = lengths > limit
    if is_long.any() and config.overlong_prompt == "error":
        first = int(is_long.argmax())
        raise DataError(
            location=location(first),
            because=f"the prompt has {lengths[first]} tokens with the chat template, data.max_prompt_length is {limit} "
            f"({is_long.sum()} of {len(lengths)} rows are longer)",
            fix=f"Use data.max_prompt_length={lengths.max()}, or data.overlong_prompt=filter or truncate_left",
        )
    kept = np.flatnonzero(~is_long) if config.overlong_prompt == "filter" else np.arange(len(lengths))
    if not len(kept):
        raise DataError(
            location=location(0),
            because=f"this prompt and all others are longer than data.max_prompt_length={limit}; filtering leaves none",
            fix=f"Use data.max_prompt_length={lengths.max()}",
        )
    return kept


def _measure(rows: RowSource, chat: ChatFormat) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[rows] tokens of each prompt, and [rows] the largest token id of each."""
    lengths, largest = list[int](), list[int]()
    for batch in rows.prompts():
        for ids in _encoded(batch, chat, rows, len(lengths)):
            if not ids:
                raise DataError(
                    location=rows.location(len(lengths)), because="the prompt is empty", fix="Fix or delete the row"
                )
            lengths.append(len(ids))
            largest.append(max(ids))
    return np.array(lengths, dtype=np.int32), np.array(largest, dtype=np.int32)


def _encoded(batch: Sequence[Row], chat: ChatFormat, rows: RowSource, first: int) -> list[Ids]:
    """Token ids of the prompts of a batch, which begins with row ``first``."""
    try:
        return chat.encode_prompts([row.prompt for row in batch], [row.tools for row in batch])
    except ChatError:
        return [_encoded_alone(row, chat, rows.location(first + i)) for i, row in enumerate(batch)]


def _encoded_alone(row: Row, chat: ChatFormat, location: str) -> Ids:
    try:
        return chat.encode_prompts([row.prompt], [row.tools])[0]
    except ChatError as error:
        raise DataError(location=location, because=str(error), fix="Fix or delete the row") from error
