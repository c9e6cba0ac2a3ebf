"""Preferences -> pairs of samples: one prompt, the response that was preferred and the one that was not.

A row without a prompt has it as the common beginning of its two responses; turns of a response may repeat the prompt
first. Published data sets do either. The loss mask is True on what comes after the prompt and an assistant said;
assistant turns inside the prompt are context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import DataError
from rlmodule.core.types import Sample
from rlmodule.data.chat import ChatFormat, Segment, Turns, as_turns, join
from rlmodule.data.demonstrations import encode_row, sample_of
from rlmodule.data.files import RawRow, RowTable, open_files
from rlmodule.data.formats import Row, read_turns
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
    """One row: a prompt, the better response, the worse one, and where it stands."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    location: str


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
    files, key, limit = config.files_of(split)
    rows = [row for table in open_files(files, key) for row in _read(table, config)]
    return _pairs(rows[:limit], config, tokenizer)


def _read(table: RowTable, config: DataConfig) -> list[Preference]:
    wanted = {"data.chosen_key": config.chosen_key, "data.rejected_key": config.rejected_key}
    if config.prompt_key:
        wanted["data.prompt_key"] = config.prompt_key
    for key, column in wanted.items():
        if column not in table.columns:
            raise DataError(
                location=table.name,
                because=f"there is no column '{column}'; its columns are {', '.join(table.columns)}",
                fix=f"Set {key} to one of them",
            )
    prompt_key = config.prompt_key or "prompt"
    columns = [column for column in (prompt_key, *wanted.values()) if column in table.columns]
    rows: list[Preference] = []
    for batch in table.batches(columns):
        rows += [_preference(raw, prompt_key, config, table.location(len(rows) + i)) for i, raw in enumerate(batch)]
    return rows


def _preference(raw: RawRow, prompt_key: str, config: DataConfig, location: str) -> Preference:
    for column in (config.chosen_key, config.rejected_key):
        if raw.get(column) is None:
            raise DataError(
                location=location, because=f"the row has no '{column}'", fix="Fill it in, or delete the row"
            )
    chosen, rejected = (read_turns(raw[key], key, location) for key in (config.chosen_key, config.rejected_key))
    if raw.get(prompt_key) is None:
        prompt, chosen, rejected = _without_common_beginning(chosen, rejected, location)
    else:
        prompt = read_turns(raw[prompt_key], prompt_key, location)
        chosen, rejected = _behind(prompt, chosen), _behind(prompt, rejected)
    for said in (chosen, rejected):
        if not isinstance(said, str) and [turn["role"] for turn in said[:1]] != ["assistant"]:
            raise DataError(
                location=location,
                because="a response must begin with an assistant turn behind the prompt",
                fix="Fix the row",
            )
    return Preference(prompt, chosen, rejected, location)


def _without_common_beginning(chosen: Turns, rejected: Turns, location: str) -> tuple[Turns, Turns, Turns]:
    """The prompt that both begin with, and what is left of them."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(location=location, because="one response is a text and the other are turns", fix="Fix the row")
    start = _end_of_common_beginning(chosen, rejected)
    if start in (0, len(chosen), len(rejected)):
        raise DataError(
            location=location,
            because="the row has no prompt, and its responses do not differ after a common beginning that could be one",
            fix="Give it a prompt, or delete the row",
        )
    return chosen[:start], chosen[start:], rejected[start:]


def _behind(prompt: Turns, said: Turns) -> Turns:
    """The response without the prompt's own turns, where it begins with them."""
    turns = list(as_turns(prompt))
    return said[len(turns) :] if not isinstance(said, str) and list(said[: len(turns)]) == turns else said


def _end_of_common_beginning(chosen: Turns, rejected: Turns) -> int:
    """Characters or turns that both have; the space before the first differing word belongs to the responses."""
    same = zip(chosen, rejected, strict=False)
    end = next((i for i, (a, b) in enumerate(same) if a != b), min(len(chosen), len(rejected)))
    return end - 1 if end and chosen[end - 1] == " " else end


def _pairs(
    rows: Sequence[Preference], config: DataConfig, tokenizer: PreTrainedTokenizerBase, source: str = ""
) -> list[Pair]:
    chat = config.chat_format(tokenizer)
    both = [[Row(prompt=row.prompt, completion=said, source=source) for said in _said(row)] for row in rows]
    segments = [
        [_encode(completed, chat, row.location) for completed in pair] for row, pair in zip(rows, both, strict=True)
    ]
    lengths = np.array([len(chosen[0].ids) for chosen, _ in segments], dtype=np.int32)
    pairs = []
    for number in map(int, keep_by_length(lengths, config, lambda number: rows[number].location)):
        chosen, rejected = (
            sample_of(number, *parts, tokenizer, config.max_prompt_length)
            for parts in zip(both[number], segments[number], strict=True)
        )
        pairs.append(Pair(replace(chosen, sample_id=2 * number), replace(rejected, sample_id=2 * number + 1)))
    return pairs


def _said(row: Preference) -> tuple[Turns, Turns]:
    """Both responses; a text that answers turns is one assistant turn."""
    if isinstance(row.prompt, str):
        return row.chosen, row.rejected
    chosen, rejected = (
        [{"role": "assistant", "content": said}] if isinstance(said, str) else said
        for said in (row.chosen, row.rejected)
    )
    return chosen, rejected


def _encode(row: Row, chat: ChatFormat, location: str) -> list[Segment]:
    """The segments of one response behind its prompt, whose own assistant turns are merged into it."""
    turns = [] if isinstance(row.prompt, str) else row.prompt
    if turns and turns[-1].get("role") == "assistant":
        raise DataError(
            location=location,
            because="the prompt ends with an assistant turn, which is what responses are",
            fix="Fix the row",
        )
    segments = encode_row(row, chat, location)
    earlier = 2 * sum(turn.get("role") == "assistant" for turn in turns)  # each turn, and what leads to the next
    ids, _ = join(segments[: earlier + 1])
    return [Segment(tuple(ids), sampled=False), *segments[earlier + 1 :]]
