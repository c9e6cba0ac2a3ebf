"""Responses that were sampled and rewarded earlier, by group; every row is checked before anything is loaded.

Reads what a run leaves in ``rollouts/``, and tables of other engines that say the same in columns of other names. Every
row is read once at the start; after that a group is read when it is needed, so memory holds lengths, not tokens.
Leaves out the fields of a row (``rollout_rows.py``), the order of groups (``stream.py``) and training on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import DataError
from rlmodule.data.config import DataConfig
from rlmodule.data.files import open_files
from rlmodule.data.rollout_rows import RowReader, Sampling, StoredResponse, choose_columns
from rlmodule.data.tables import TableChain, in_batches


@dataclass
class RolloutTable:
    """Stored responses by group, read on demand.

    Args:
        name: where they are.
        chain: the files.
        readers: one per file.
        groups: rows of each group, in file order; groups in the order of their first rows.
        lengths: [rows] tokens of prompt and response.
        samplings: how responses were drawn -> the first row that was drawn so; None: it does not say.
        without_logprobs: the first row that has none of the sampler's, None where all have.
        without_teacher: the first row that has none of a teacher's, None where all have.
        num_unscored: rows without a finite reward.
        num_encoded: rows of which ids were made from text.
    """

    name: str
    chain: TableChain
    readers: Sequence[RowReader]
    groups: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samplings: dict[Sampling | None, int] = field(default_factory=dict)
    without_logprobs: int | None = None
    without_teacher: int | None = None
    num_unscored: int = 0
    num_encoded: int = 0

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def largest(self) -> int:
        """Responses of the largest group."""
        return max(len(rows) for rows in self.groups)

    def location(self, row: int) -> str:
        """``file:line`` of a row."""
        return self.chain.location(row)

    def read(self, rows: Sequence[int]) -> list[StoredResponse]:
        """The rows of these positions, in the same order."""
        found = zip(rows, self.chain.select(rows), strict=True)
        return [self.readers[table](raw, row, self.location(row)) for row, (table, raw) in found]

    def describe_columns(self) -> str:
        """For the run's plan: columns that are not read; empty where there are none."""
        pairs = zip(self.chain.tables, self.readers, strict=True)
        read = [(table.columns, set(reader.columns.values())) for table, reader in pairs]
        left = dict.fromkeys(column for columns, used in read for column in columns if column not in used)
        return f"not read: {', '.join(left)}" if left else ""

    def describe(self) -> str:
        """One line for the run's plan."""
        text = f"{len(self.lengths)} stored responses in {len(self)} groups of up to {self.largest}, {self.name}"
        if self.num_unscored:
            text += f", {self.num_unscored} without a reward"
        if self.num_encoded:
            text += f", {self.num_encoded} encoded from text, so their ids may differ from those that were sampled"
        return text


def load_rollouts(path: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> RolloutTable:
    """Open and check every row.

    Args:
        path: a file, or a folder of files.
        config: how prompts without ids become tokens.
        tokenizer: of the model.
        vocab_size: ids the model has.

    Raises:
        ConfigError: no file there, or the tokenizer has no chat template.
        DataError: a row cannot be used; the message has ``file:line``.
    """
    tables = open_files([path], "data.rollouts")
    chat = partial(config.chat_format, tokenizer)
    readers = [RowReader(choose_columns(table), tokenizer, chat, vocab_size) for table in tables]
    made = RolloutTable(path, TableChain(tables), readers)
    numbers: dict[str, int] = {}  # what rows call their group -> its number
    prompts: list[tuple[int, int]] = []  # of each group: its first row, and a hash of the prompt
    for rows in in_batches(len(made.chain)):
        for row, response in zip(rows, made.read(rows), strict=True):
            number = len(prompts) if response.group is None else numbers.setdefault(response.group, len(prompts))
            _take_note(made, prompts, number, row, response)
    if made.num_unscored == len(made.lengths):
        raise DataError(location=path, because="no row has a finite reward", fix="Reward the responses first")
    return made


def _take_note(
    made: RolloutTable, prompts: list[tuple[int, int]], number: int, row: int, response: StoredResponse
) -> None:
    asked = hash(response.prompt.ids)
    if number == len(prompts):
        prompts.append((row, asked))
        made.groups.append([])
    if prompts[number][1] != asked:
        raise DataError(
            location=made.location(row),
            because=f"group {response.group} answers another prompt than in {made.location(prompts[number][0])}",
            fix="Give every prompt row of every iteration a group id of its own",
        )
    made.groups[number].append(row)
    made.lengths.append(response.length)
    made.samplings.setdefault(response.sampling, row)
    if response.logprob is None and made.without_logprobs is None:
        made.without_logprobs = row
    if response.teacher_logprob is None and made.without_teacher is None:
        made.without_teacher = row
    made.num_unscored += response.score.value is None
    made.num_encoded += response.is_encoded
