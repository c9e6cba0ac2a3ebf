"""Rows of an environment or of files -> prompts with token ids, checked before anything else is loaded.

Every row is read and measured once at the start; after that a prompt is made when it is needed, so memory holds
lengths, not texts. Leaves out the order they come in (``stream.py``) and responses (``demonstrations.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import DataError
from rlmodule.core.types import Prompt
from rlmodule.data.chat import ChatError, ChatFormat, prompt_text
from rlmodule.data.config import DataConfig
from rlmodule.data.row import Row
from rlmodule.data.rows import RowSource, open_rows
from rlmodule.data.tables import LazyRows, RowTable
from rlmodule.data.tokens import Ids

READ_AT_ONCE = 4096  # rows


class PromptTable(LazyRows[Prompt]):
    """Prompts by position, encoded when they are needed.

    Args:
        rows: where they come from.
        chat: how they become tokens.
        kept: [P] int64, positions in ``rows`` of the prompts in use.
        lengths: [P] int32, tokens of each, before truncation.
        limit: prompts longer than this lose tokens on the left.
        largest_ids: [P] int32, the largest token id of each, before truncation.
        spelling: [S] int32, positions in ``rows`` of prompts that spell a special token.
    """

    def __init__(
        self,
        rows: RowSource,
        chat: ChatFormat,
        kept: NDArray[np.int64],
        lengths: NDArray[np.int32],
        limit: int,
        largest_ids: NDArray[np.int32],
        spelling: NDArray[np.int32],
    ) -> None:
        self.rows, self._chat, self.kept, self._limit = rows, chat, kept, limit
        self._largest_ids, self._spelling = largest_ids, spelling
        self.lengths = np.minimum(lengths, limit)
        self.num_filtered = len(rows) - len(kept)
        self.num_truncated = int((lengths > limit).sum())

    def __len__(self) -> int:
        return len(self.kept)

    def select(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of these positions, in the same order.

        ``Prompt.row`` is the position before filtering, over all files of the split: what ``location`` understands.
        """
        positions = [int(self.kept[index]) for index in indices]
        rows = self.rows.select(positions)
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
            positions = [int(position) for position in self.kept[start : start + READ_AT_ONCE]]
            for position, row in zip(positions, self.rows.select(positions), strict=True):
                missing = missing_fields(row.answer, {"source": row.source, **row.meta})
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
            position = int(self.kept[unknown[0]])
            raise unknown_token(self.location(position), int(self._largest_ids[unknown[0]]), vocab_size)

    def location(self, row: int) -> str:
        """``file:line`` of ``Prompt.row``."""
        return self.rows.location(row)

    def describe_columns(self) -> str:
        """For the run's plan: which column is read as what."""
        others = "for the reward alone"
        text = self.rows.describe_columns(("prompt", "context", "system", "tools", "answer", "source"), others)
        return text + tools_note(self.rows, self._chat)

    def describe(self) -> str:
        """One line for the run's plan."""
        text = f"{len(self)} prompts of {self.rows.name}, {self.lengths.min()} to {self.lengths.max()} tokens"
        text += f" (mean {self.lengths.mean():.1f})"
        if self.num_filtered:
            text += f", {self.num_filtered} longer ones filtered out"
        if self.num_truncated:
            text += f", {self.num_truncated} cut on the left"
        if len(self._spelling):
            [first] = self.rows.select([int(self._spelling[0])])
            text += f", special tokens that {len(self._spelling)} of them spell are read as text "
            text += f"({self._chat.spelled_token(first.prompt)!r} in {self.location(int(self._spelling[0]))})"
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
    lengths, largest, spelling = _measure(rows, chat)
    kept = keep_by_length(lengths, config, rows.location)
    return PromptTable(rows, chat, kept, lengths[kept], config.max_prompt_length, largest[kept], spelling)


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


def keep_by_length(
    lengths: NDArray[np.integer[Any]], config: DataConfig, location: Callable[[int], str]
) -> NDArray[np.int64]:
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


def _measure(rows: RowSource, chat: ChatFormat) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """[rows] tokens of each prompt, [rows] the largest token id of each, and which of them spell a special token."""
    lengths, largest, spelling = array("i"), array("i"), array("i")
    for batch in rows.prompts():
        spelling.extend(len(lengths) + i for i, row in enumerate(batch) if chat.spelled_token(row.prompt) is not None)
        for ids in _encoded(batch, chat, rows, len(lengths)):
            if not ids:
                raise DataError(
                    location=rows.location(len(lengths)), because="the prompt is empty", fix="Fix or delete the row"
                )
            lengths.append(len(ids))
            largest.append(max(ids))
    return _as_array(lengths), _as_array(largest), _as_array(spelling)


def _as_array(numbers: array[int]) -> NDArray[np.int32]:
    return np.frombuffer(numbers, dtype=np.int32)


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
        raise chat.error_of(error, location) from error
