"""Preferences -> pairs of samples: one prompt, the response that was preferred and the one that was not.

A row without a prompt has it as the common beginning of its two responses; turns of a response may repeat the prompt
first. Published data sets do either. The loss mask is True on what comes after the prompt and an assistant says;
assistant turns inside the prompt are context.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import DataError
from rlmodule.core.types import Sample
from rlmodule.data.chat import ChatFormat, Segment, Tools, Turns
from rlmodule.data.demonstrations import encode_row, sample_of
from rlmodule.data.files import RawRow, RowTable, open_files
from rlmodule.data.formats import (
    Columns,
    Row,
    choose_preference_columns,
    ends_with_assistant,
    read_prompt,
    read_row_tools,
    read_turns,
    with_system_turn,
)
from rlmodule.data.messages import without_prompt
from rlmodule.data.prompts import DataConfig, keep_by_length


@dataclass(frozen=True, eq=False)
class Pair:
    """Two samples of one prompt, of one group; ids count both responses of every row."""

    chosen: Sample
    rejected: Sample

    @property
    def samples(self) -> tuple[Sample, Sample]:
        """Both, the chosen one first."""
        return self.chosen, self.rejected


@dataclass(frozen=True)
class Preference:
    """One row: a prompt, the better response, the worse one, its location, and tools that the assistant may call."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    location: str
    tools: Tools | None = None


def environment_preferences(
    triples: Sequence[tuple[str, str, str]], name: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Pair]:
    """Pairs of an environment.

    Args:
        triples: prompt, right and wrong response, as the environment makes them.
        name: of the environment.
        config: limits, and how prompts become tokens.
        tokenizer: of the model.

    Raises:
        DataError: a prompt is longer than the limit, see ``overlong_prompt``.
    """
    rows = [
        Preference(*triple, location=f"preference {number} of environment {name}")
        for number, triple in enumerate(triples, start=1)
    ]
    return _pairs(rows, config, tokenizer, source=name)


class PreferenceSource:
    """The rows of the files of one split; their columns are checked when it is made.

    Args:
        config: names files and columns.
        split: ``train`` or ``test``; the rows of the latter come from ``val_files``.

    Raises:
        ConfigError: a file is missing.
        DataError: a file lacks a column.
    """

    def __init__(self, config: DataConfig, split: str) -> None:
        files, key, self._limit = config.files_of(split)
        self._config = config
        self._tables = [(table, _columns(table, config)) for table in open_files(files, key)]

    def pairs(self, tokenizer: PreTrainedTokenizerBase) -> list[Pair]:
        """The rows as pairs of samples.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: a row cannot be used; the message has ``file:line``.
        """
        rows = [row for table, columns in self._tables for row in _read(table, columns, self._config)]
        return _pairs(rows[: self._limit], self._config, tokenizer)

    def describe_columns(self) -> str:
        """For the run's plan: which column is read as what."""
        config, lines = self._config, dict[str, None]()
        own = f"chosen = {config.chosen_key}, rejected = {config.rejected_key}"
        for table, columns in self._tables:
            rest = [name for name in table.columns if name not in (config.chosen_key, config.rejected_key)]
            prompt = "" if columns.prompt else "prompt = what both begin with"
            read = columns.describe(("prompt", "context", "system", "tools"), rest, "not read")
            lines[", ".join(filter(None, (own, prompt, read))).replace(", ;", ";")] = None
        return " | ".join(lines)


def file_preferences(config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str) -> list[Pair]:
    """Pairs of files: a chosen and a rejected response each, and a prompt that may stand inside them.

    Args:
        config: where they are, limits, and how prompts become tokens.
        tokenizer: of the model.
        split: ``train`` or ``test``; the rows of the latter come from ``val_files``.

    Raises:
        ConfigError: a file is missing, or the tokenizer has no chat template.
        DataError: a file lacks a column, or a row cannot be used; the message has ``file:line``.
    """
    return PreferenceSource(config, split).pairs(tokenizer)


def _columns(table: RowTable, config: DataConfig) -> Columns:
    for key, column in (("data.chosen_key", config.chosen_key), ("data.rejected_key", config.rejected_key)):
        if column not in table.columns:
            raise DataError(
                location=table.name,
                because=f"there is no column '{column}'; its columns are {', '.join(table.columns)}",
                fix=f"Set {key} to one of them",
            )
    return choose_preference_columns(table, config.column_keys)


def _read(table: RowTable, columns: Columns, config: DataConfig) -> list[Preference]:
    rows: list[Preference] = []
    for batch in table.batches([*columns.of_prompt, config.chosen_key, config.rejected_key]):
        rows += [_preference(raw, columns, config, table, len(rows) + i) for i, raw in enumerate(batch)]
    return rows


def _preference(raw: RawRow, columns: Columns, config: DataConfig, table: RowTable, number: int) -> Preference:
    location = table.location(number)
    for column in (config.chosen_key, config.rejected_key):
        if raw.get(column) is None:
            raise DataError(
                location=location, because=f"the row has no '{column}'", fix="Fill it in, or delete the row"
            )
    chosen, rejected = (read_turns(raw[key], key, location) for key in (config.chosen_key, config.rejected_key))
    prompt = read_prompt(raw, columns, location)
    if columns.prompt == "messages" and ends_with_assistant(prompt):
        prompt = None  # the whole conversation, with the chosen response
    if prompt is None:
        prompt, chosen, rejected = _without_common_beginning(chosen, rejected, location, table.columns)
        prompt = with_system_turn(prompt, raw, columns, location)
    else:
        chosen, rejected = without_prompt(prompt, chosen), without_prompt(prompt, rejected)
    for response in (chosen, rejected):
        if not isinstance(response, str) and [turn["role"] for turn in response[:1]] != ["assistant"]:
            raise DataError(
                location=location,
                because="a response must begin with an assistant turn behind the prompt",
                fix="Fix the row",
            )
    return Preference(prompt, chosen, rejected, location, read_row_tools(raw, columns, location))


def _without_common_beginning(
    chosen: Turns, rejected: Turns, location: str, present: Sequence[str]
) -> tuple[Turns, Turns, Turns]:
    """The prompt that both begin with, and what is left of them."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(location=location, because="one response is a text and the other are turns", fix="Fix the row")
    start = _end_of_common_beginning(chosen, rejected)
    if start in (0, len(chosen), len(rejected)):
        raise DataError(
            location=location,
            because="the row has no prompt, and its responses do not differ after a common beginning that could be "
            f"one; the columns are {', '.join(present)}",
            fix="Set data.prompt_key to the one with the prompt, give the row a prompt, or delete the row",
        )
    return chosen[:start], chosen[start:], rejected[start:]


def _end_of_common_beginning(chosen: Turns, rejected: Turns) -> int:
    """Turns that both begin with; of texts characters up to the first word that differs, without the space before it.

    A word ends at white space. Scripts that write none between words are cut between any two characters.
    """
    same = zip(chosen, rejected, strict=False)
    end = next((i for i, (a, b) in enumerate(same) if a != b), min(len(chosen), len(rejected)))
    if not isinstance(chosen, str):
        return end
    while end and not _ends_word(chosen[end - 1]):
        end -= 1
    return end - 1 if end and chosen[end - 1] == " " else end


def _ends_word(character: str) -> bool:
    return character.isspace() or unicodedata.east_asian_width(character) in "WF"


def _pairs(
    rows: Sequence[Preference], config: DataConfig, tokenizer: PreTrainedTokenizerBase, source: str = ""
) -> list[Pair]:
    chat = config.chat_format(tokenizer)
    both = [_completed(row, source) for row in rows]
    segments = [_encode(row, pair, chat) for row, pair in zip(rows, both, strict=True)]
    lengths = np.array([len(chosen[0].ids) for chosen, _ in segments], dtype=np.int32)
    pairs = []
    for number in map(int, keep_by_length(lengths, config, lambda number: rows[number].location)):
        chosen, rejected = (
            sample_of(number, *parts, tokenizer, config.max_prompt_length, rows[number].location)
            for parts in zip(both[number], segments[number], strict=True)
        )
        pairs.append(Pair(replace(chosen, sample_id=2 * number), replace(rejected, sample_id=2 * number + 1)))
    return pairs


def _completed(row: Preference, source: str) -> tuple[Row, Row]:
    """The row with either response as its completion; a text that answers turns is one assistant turn."""

    def completed(response: Turns) -> Row:
        is_bare = isinstance(response, str) and not isinstance(row.prompt, str)
        completion = [{"role": "assistant", "content": response}] if is_bare else response
        return Row(prompt=row.prompt, completion=completion, source=source, tools=row.tools)

    return completed(row.chosen), completed(row.rejected)


def _encode(row: Preference, pair: Sequence[Row], chat: ChatFormat) -> list[list[Segment]]:
    """The segments of both responses behind their prompt."""
    if ends_with_assistant(row.prompt):
        raise DataError(
            location=row.location,
            because="the prompt ends with an assistant turn, which is what responses are",
            fix="Fix the row",
        )
    chosen, rejected = (encode_row(completed, chat, row.location) for completed in pair)
    if chosen[0].ids != rejected[0].ids:
        raise DataError(
            location=row.location,
            because="the chat template writes the prompt in two ways, for one response has reasoning and the other has "
            "none",
            fix="Give both responses reasoning, or neither",
        )
    return [chosen, rejected]
