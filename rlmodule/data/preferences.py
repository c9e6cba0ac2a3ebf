"""Preferences -> pairs of samples: one prompt, the response that was preferred and the one that was not.

A row without a prompt has it as the common beginning of its two responses; turns of a response may repeat the prompt
first. Published data sets do either. The loss mask is True on what comes after the prompt and an assistant says;
assistant turns inside the prompt are context.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import DataError
from rlmodule.core.types import Sample
from rlmodule.data.chat import ChatFormat, Tools, Turns
from rlmodule.data.config import DataConfig
from rlmodule.data.demonstrations import encode_row
from rlmodule.data.formats import Columns, choose_preference_columns
from rlmodule.data.given_responses import Encoded, ResponseRows, ResponseTable
from rlmodule.data.messages import without_prompt
from rlmodule.data.row import Row, ends_with_assistant, read_prompt, read_row_tools, read_turns, with_system_turn
from rlmodule.data.rows import TableRows, open_split
from rlmodule.data.tables import LazyRows, RawRow, RowTable

CONVERSATIONS = ("messages", "conversations")  # columns that may hold the chosen response as well


@dataclass(frozen=True, eq=False)
class Pair:
    """Two samples of one prompt, of one group; ids count both responses of every row."""

    chosen: Sample
    rejected: Sample

    @property
    def samples(self) -> tuple[Sample, Sample]:
        """Both, the chosen one first."""
        return self.chosen, self.rejected


class PairTable(LazyRows[Pair]):
    """Pairs by position, made when they are needed.

    Args:
        rows: both samples of each.
    """

    def __init__(self, rows: ResponseTable) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int]) -> list[Pair]:
        """The pairs of these positions, in the same order."""
        return [Pair(*samples) for samples in self.rows.select(indices)]


@dataclass(frozen=True)
class Preference:
    """One row: a prompt, the better response, the worse one, its location, and tools that the assistant may call."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    location: str
    tools: Tools | None = None


def environment_preferences(
    triples: Sequence[tuple[str, str, str]],
    name: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    extended: bool = False,
) -> PairTable:
    """Pairs of an environment.

    Args:
        triples: prompt, right and wrong response, as the environment makes them.
        name: of the environment.
        config: limits, and how prompts become tokens.
        tokenizer: of the model.
        extended: as a reward model reads them, which gives its score at the position after the end.

    Raises:
        DataError: a row is longer than a limit, see ``overlong_prompt`` and ``overlong_demonstration``.
    """
    chat = config.chat_format(tokenizer)

    def location(row: int) -> str:
        return f"preference {row + 1} of environment {name}"

    def encode(positions: Sequence[int]) -> list[Encoded]:
        return [_encode(Preference(*triples[i], location=location(i)), chat, source=name) for i in positions]

    return PairTable(
        ResponseTable(ResponseRows(len(triples), 2, encode, location), config, tokenizer, extended=extended)
    )


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
        self._config = config
        self.rows = TableRows(open_split(config, split))
        self._columns = [_columns(table, config) for table in self.rows.chain.tables]

    def pairs(self, tokenizer: PreTrainedTokenizerBase, *, extended: bool = False) -> PairTable:
        """The rows as pairs of samples; every row is read.

        Args:
            tokenizer: of the model.
            extended: as in ``environment_preferences``.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: a row cannot be used; the message has ``file:line``.
        """
        chat, chain = self._config.chat_format(tokenizer), self.rows.chain

        def encode(positions: Sequence[int]) -> list[Encoded]:
            found = zip(positions, chain.select(positions), strict=True)
            return [_encode(self._preference(number, raw, position), chat) for position, (number, raw) in found]

        rows = ResponseRows(len(self.rows), 2, encode, chain.location)
        return PairTable(ResponseTable(rows, self._config, tokenizer, extended=extended))

    def _preference(self, table: int, raw: RawRow, position: int) -> Preference:
        present = self.rows.chain.tables[table].columns
        return _preference(raw, self._columns[table], self._config, self.rows.chain.location(position), present)

    def describe_columns(self) -> str:
        """For the run's plan: which column is read as what."""
        config, lines = self._config, dict[str, None]()
        own = f"chosen = {config.chosen_key}, rejected = {config.rejected_key}"
        for table, columns in zip(self.rows.chain.tables, self._columns, strict=True):
            rest = [name for name in table.columns if name not in (config.chosen_key, config.rejected_key)]
            prompt = "" if columns.prompt else "prompt = what both begin with"
            read = columns.describe(("prompt", "context", "system", "tools"), rest, "not read")
            lines[", ".join(filter(None, (own, prompt, read))).replace(", ;", ";")] = None
        return " | ".join(lines)


def file_preferences(config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str) -> PairTable:
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


def _preference(raw: RawRow, columns: Columns, config: DataConfig, location: str, present: Sequence[str]) -> Preference:
    for column in (config.chosen_key, config.rejected_key):
        if raw.get(column) is None:
            raise DataError(
                location=location, because=f"the row has no '{column}'", fix="Fill it in, or delete the row"
            )
    chosen, rejected = (
        read_turns(raw[key], key, location, columns.turn_marks) for key in (config.chosen_key, config.rejected_key)
    )
    prompt = read_prompt(raw, columns, location)
    if columns.prompt in CONVERSATIONS and ends_with_assistant(prompt):
        prompt = None  # the whole conversation, with the chosen response
    if prompt is None:
        prompt, chosen, rejected = _without_common_beginning(chosen, rejected, location, present)
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


def _completed(row: Preference, source: str) -> tuple[Row, Row]:
    """The row with either response as its completion; a text that answers turns is one assistant turn."""

    def completed(response: Turns) -> Row:
        is_bare = isinstance(response, str) and not isinstance(row.prompt, str)
        completion = [{"role": "assistant", "content": response}] if is_bare else response
        return Row(prompt=row.prompt, completion=completion, source=source, tools=row.tools)

    return completed(row.chosen), completed(row.rejected)


def _encode(row: Preference, chat: ChatFormat, source: str = "") -> Encoded:
    """Both responses behind their prompt."""
    if ends_with_assistant(row.prompt):
        raise DataError(
            location=row.location,
            because="the prompt ends with an assistant turn, which is what responses are",
            fix="Fix the row",
        )
    pair = _completed(row, source)
    chosen, rejected = (encode_row(completed, chat, row.location) for completed in pair)
    if chosen[0].ids != rejected[0].ids:
        raise DataError(
            location=row.location,
            because="the chat template writes the prompt in two ways, for one response has reasoning and the other has "
            "none",
            fix="Give both responses reasoning, or neither",
        )
    return list(zip(pair, (chosen, rejected), strict=True))
