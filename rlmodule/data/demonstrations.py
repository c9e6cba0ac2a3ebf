"""Demonstrated responses -> samples for supervised training. Leaves out responses sampled by a model.

A row has a prompt and a completion, of which the completion is trained; or a whole conversation, of which every
assistant turn is. The loss mask is True on what an assistant says, the token that ends its turn included, and False on
the tool and user turns in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import DataError
from rlmodule.core.types import Prompt, Sample
from rlmodule.data.chat import ChatError, ChatFormat, Message, Segment, as_turns, join, prompt_text
from rlmodule.data.files import in_batches
from rlmodule.data.formats import Row
from rlmodule.data.messages import is_assistant, without_prompt
from rlmodule.data.prompts import DataConfig, keep_by_length, open_rows, tools_note


def environment_demonstrations(
    pairs: Sequence[tuple[str, str]], name: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Samples of what an environment demonstrates.

    Args:
        pairs: prompt and response, as the environment makes them.
        name: of the environment.
        config: limits, and how prompts become tokens.
        tokenizer: of the model.

    Raises:
        DataError: a prompt is longer than the limit, see ``overlong_prompt``.
    """
    rows = [Row(prompt=prompt, completion=response, source=name) for prompt, response in pairs]

    def location(row: int) -> str:
        return f"demonstration {row + 1} of environment {name}"

    chat = config.chat_format(tokenizer)
    segments = [encode_row(row, chat, location(number)) for number, row in enumerate(rows)]
    return _samples(rows, segments, config, tokenizer, location)


def file_demonstrations(config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str) -> list[Sample]:
    """Samples of files with a prompt and a completion, or with whole conversations.

    Args:
        config: where they are, limits, and how prompts become tokens.
        tokenizer: of the model.
        split: ``train`` or ``test``; the rows of the latter come from ``val_files``.

    Raises:
        ConfigError: a file is missing, or the tokenizer has no chat template.
        DataError: a row has no response or cannot be used; the message has ``file:line``.
    """
    return DemonstrationSource(config, split).samples(tokenizer)


class DemonstrationSource:
    """The rows of the files of one split; their columns are checked when it is made.

    Args:
        config: names files and columns.
        split: ``train`` or ``test``; the rows of the latter come from ``val_files``.

    Raises:
        ConfigError: a file is missing.
        DataError: a file lacks a column.
    """

    def __init__(self, config: DataConfig, split: str) -> None:
        self._config = config
        self._rows = open_rows(config, split)
        self._rows.check_completions()
        self._notes = ""

    def samples(self, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """The rows as samples.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: a row has no response or cannot be used; the message has ``file:line``.
        """
        rows = [row for batch in in_batches(len(self._rows)) for row in self._rows.select(batch)]
        chat = self._config.chat_format(tokenizer)
        segments = [encode_row(row, chat, self._rows.location(number)) for number, row in enumerate(rows)]
        self._notes = tools_note(self._rows, chat) + _context_note(rows, segments)
        return _samples(rows, segments, self._config, tokenizer, self._rows.location)

    def describe_columns(self) -> str:
        """For the run's plan: which column is read as what, and what of it is not trained."""
        roles = ("prompt", "context", "completion", "system", "tools")
        return self._rows.describe_columns(roles, "not read") + self._notes


def _context_note(rows: Sequence[Row], segments: Sequence[Sequence[Segment]]) -> str:
    turns = sum(is_assistant(turn) for row in rows for turn in _answers(row))
    texts = sum(isinstance(row.completion, str) for row in rows)
    left = turns + texts - sum(part.sampled for parts in segments for part in parts)
    return f"; {left} earlier turns are not trained, for the chat template drops their reasoning" if left else ""


def _answers(row: Row) -> Sequence[Message]:
    """The turns of a row of which those of the assistant are trained."""
    turns = row.prompt if row.completion is None else row.completion
    return () if isinstance(turns, str) else turns


def _samples(
    rows: Sequence[Row],
    segments: Sequence[Sequence[Segment]],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    location: Callable[[int], str],
) -> list[Sample]:
    lengths = np.array([len(prompt.ids) for prompt, *_ in segments], dtype=np.int32)
    return [
        sample_of(number, rows[number], segments[number], tokenizer, config.max_prompt_length, location(number))
        for number in map(int, keep_by_length(lengths, config, location))
    ]


def encode_row(row: Row, chat: ChatFormat, location: str) -> list[Segment]:
    """Prompt and completion as segments; the first is what comes before the first turn that is trained.

    Raises:
        DataError: the row cannot be put into tokens.
    """
    try:
        segments = _encode(row, chat)
        if not segments[0].ids:
            raise ChatError("the prompt is empty")
    except ChatError as error:
        raise DataError(location=location, because=str(error), fix="Fix or delete the row") from error
    return segments


def _encode(row: Row, chat: ChatFormat) -> list[Segment]:
    if isinstance(row.completion, str):
        return chat.encode_demonstration(row.prompt, row.completion, row.tools)
    turns = as_turns(row.prompt)
    if row.completion:
        completion = without_prompt(turns, row.completion)
        return chat.encode_conversation([*turns, *completion], num_context=len(turns), tools=row.tools)
    if isinstance(row.prompt, str):
        raise ChatError(
            "the row has no completion; a conversation must begin with a prompt and end with an assistant turn"
        )
    return chat.encode_conversation(turns, tools=row.tools)


def sample_of(
    number: int,
    row: Row,
    segments: Sequence[Segment],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    location: str,
) -> Sample:
    """The sample of row ``number``; its first segment is the prompt, which keeps its last tokens."""
    prompt, *rest = segments
    ids, mask = join(rest)
    return Sample(
        sample_id=number,
        group_id=number,
        prompt=Prompt(
            row=number,
            ids=prompt.ids[-max_prompt_length:],
            text=prompt_text(row.prompt),
            answer=row.answer,
            source=row.source,
            meta=row.meta,
            answer_value=row.answer_value,
            location=location,
        ),
        response_ids=torch.tensor(ids, dtype=torch.int64),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        text=str(tokenizer.decode(ids, skip_special_tokens=True)),
    )
