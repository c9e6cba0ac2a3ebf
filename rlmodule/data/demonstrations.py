"""Demonstrated responses -> samples for supervised training. Leaves out responses sampled by a model.

The prompt is what comes before the first assistant turn. The loss mask is True on everything an assistant said, the
token that ends its turn included, and False on the tool and user turns in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import DataError
from rlmodule.core.types import Prompt, Sample
from rlmodule.data.chat import ChatError, ChatFormat, Segment, as_turns, join, prompt_text
from rlmodule.data.files import in_batches
from rlmodule.data.formats import Row
from rlmodule.data.prompts import DataConfig, keep_by_length, open_rows


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
    return _samples(rows, config, tokenizer, lambda row: f"demonstration {row + 1} of environment {name}")


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
    source = open_rows(config, split)
    rows = [row for batch in in_batches(len(source)) for row in source.select(batch)]
    return _samples(rows, config, tokenizer, source.location)


def _samples(
    rows: Sequence[Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase, location: Callable[[int], str]
) -> list[Sample]:
    chat = config.chat_format(tokenizer)
    segments = [encode_row(row, chat, location(number)) for number, row in enumerate(rows)]
    lengths = np.array([len(prompt.ids) for prompt, *_ in segments], dtype=np.int32)
    return [
        sample_of(number, rows[number], segments[number], tokenizer, config.max_prompt_length)
        for number in map(int, keep_by_length(lengths, config, location))
    ]


def encode_row(row: Row, chat: ChatFormat, location: str) -> list[Segment]:
    """Prompt and completion as segments; the first is what comes before the first assistant turn.

    Raises:
        DataError: the row cannot be put into tokens.
    """
    try:
        if isinstance(row.completion, str):
            return chat.encode_demonstration(row.prompt, row.completion)
        return chat.encode_conversation([*as_turns(row.prompt), *(row.completion or ())])
    except ChatError as error:
        raise DataError(location=location, because=str(error), fix="Fix or delete the row") from error


def sample_of(
    number: int, row: Row, segments: Sequence[Segment], tokenizer: PreTrainedTokenizerBase, max_prompt_length: int
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
        ),
        response_ids=torch.tensor(ids, dtype=torch.int64),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        text=str(tokenizer.decode(ids, skip_special_tokens=True)),
    )
