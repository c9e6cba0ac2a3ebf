"""Demonstrated responses -> samples for supervised training. Leaves out responses sampled by a model.

A row has a prompt and a completion, of which the completion is trained; or a whole conversation, of which every
assistant turn is. The loss mask is True on what an assistant says, the token that ends its turn included, and False on
the tool and user turns in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlmodule.core.types import Sample
from rlmodule.data.chat import ChatError, ChatFormat, Segment, as_turns
from rlmodule.data.config import DataConfig
from rlmodule.data.given_responses import Encoded, ResponseRows, ResponseTable
from rlmodule.data.messages import Turns, is_assistant, without_prompt
from rlmodule.data.prompts import tools_note
from rlmodule.data.row import Row
from rlmodule.data.rows import open_rows


def environment_demonstrations(
    pairs: Sequence[tuple[str, Turns]], name: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> ResponseTable:
    """Samples of what an environment demonstrates, one of each row.

    Args:
        pairs: prompt and response, as the environment makes them.
        name: of the environment.
        config: limits, and how prompts become tokens.
        tokenizer: of the model.

    Raises:
        DataError: a row is longer than a limit, see ``overlong_prompt`` and ``overlong_demonstration``.
    """
    chat = config.chat_format(tokenizer)

    def location(row: int) -> str:
        return f"demonstration {row + 1} of environment {name}"

    def encode(positions: Sequence[int]) -> list[Encoded]:
        rows = [Row(prompt=pairs[i][0], completion=pairs[i][1], source=name) for i in positions]
        return [[(row, encode_row(row, chat, location(i)))] for i, row in zip(positions, rows, strict=True)]

    return ResponseTable(ResponseRows(len(pairs), 1, encode, location), config, tokenizer)


def file_demonstrations(config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str) -> list[Sample]:
    """All samples of files with a prompt and a completion, or with whole conversations.

    Args:
        config: where they are, limits, and how prompts become tokens.
        tokenizer: of the model.
        split: ``train`` or ``test``; the rows of the latter come from ``val_files``.

    Raises:
        ConfigError: a file is missing, or the tokenizer has no chat template.
        DataError: a row has no response or cannot be used; the message has ``file:line``.
    """
    return [sample for [sample] in DemonstrationSource(config, split).samples(tokenizer)]


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
        self.rows = open_rows(config, split)
        self.rows.check_completions()
        self._notes = ""

    def samples(self, tokenizer: PreTrainedTokenizerBase) -> ResponseTable:
        """The samples, one of each row; every row is read.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: a row has no response or cannot be used; the message has ``file:line``.
        """
        chat = self._config.chat_format(tokenizer)
        num_untrained: dict[int, int] = {}  # position -> answers that are context

        def encode(positions: Sequence[int]) -> list[Encoded]:
            made: list[Encoded] = []
            for position, row in zip(positions, self.rows.select(positions), strict=True):
                segments = encode_row(row, chat, self.rows.location(position))
                if untrained := _num_answers(row) - sum(part.sampled for part in segments):
                    num_untrained[position] = untrained
                made.append([(row, segments)])
            return made

        rows = ResponseRows(len(self.rows), 1, encode, self.rows.location)
        table = ResponseTable(rows, self._config, tokenizer)
        self._notes = tools_note(self.rows, chat) + _context_note(sum(num_untrained.values()))
        return table

    def describe_columns(self) -> str:
        """For the run's plan: which column is read as what, and what of it is not trained."""
        roles = ("prompt", "context", "completion", "system", "tools")
        return self.rows.describe_columns(roles, "not read") + self._notes


def _context_note(left: int) -> str:
    return f"; {left} earlier turns are not trained, for the chat template drops their reasoning" if left else ""


def _num_answers(row: Row) -> int:
    """Texts and turns of a row that an assistant says and that would be trained."""
    turns = row.prompt if row.completion is None else row.completion
    return int(isinstance(row.completion, str)) if isinstance(turns, str) else sum(map(is_assistant, turns))


def encode_row(row: Row, chat: ChatFormat, location: str) -> list[Segment]:
    """Prompt and completion as segments; the first is what comes before the first turn that is trained.

    Raises:
        DataError: the row cannot be put into tokens.
        ConfigError: no row can, for the chat template takes none.
    """
    try:
        segments = _encode(row, chat)
        if not segments[0].ids:
            raise ChatError("the prompt is empty")
    except ChatError as error:
        raise chat.error_of(error, location) from error
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
