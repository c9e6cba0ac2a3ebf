"""Rows with given responses: demonstrations to imitate, preference pairs to rank. Leaves out what is sampled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from rlmodule.core.contract import RolloutEngine
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, Sample
from rlmodule.data.demonstrations import DemonstrationSource, environment_demonstrations
from rlmodule.data.given_responses import ResponseTable
from rlmodule.data.order import RowOrder, order_of
from rlmodule.data.preferences import Pair, PairTable, PreferenceSource, environment_preferences
from rlmodule.data.prompts import PromptTable
from rlmodule.data.rows import TableRows
from rlmodule.experience.sources import OfflineSource, RowSampler, Source
from rlmodule.run.datasets import TrainingDataset
from rlmodule.run.preflight.lengths import check_lengths
from rlmodule.run.preflight.tokens import check_measured

# An environment is asked for demonstrations to imitate, two for each of its training rows, and for pairs, one for each.
DEMONSTRATIONS_PER_ROW, MAX_DEMONSTRATIONS, MAX_PAIRS = 2, 16384, 4096
EXAMPLES = 512  # rows whose tokens parity runs borrow


class OfflineDataset(TrainingDataset):
    """Rows with given responses."""

    rewards: ClassVar[tuple[float, ...]]  # of the samples of every row

    @property
    @abstractmethod
    def rows(self) -> ResponseTable:
        """The samples of each row; reading them checks them."""

    @property
    @abstractmethod
    def files(self) -> TableRows | None:
        """The rows of the files, used or not; None where an environment makes them."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def order(self) -> RowOrder:
        """Files mixed by weight, or easy rows first."""
        files = self.files
        return RowOrder((len(self),)) if files is None else order_of(files, self.rows.kept, self.config.data)

    @property
    def samples_per_row(self) -> float:
        """The same for every row."""
        return self.config.group_size

    def describe(self) -> str:
        """Number and kind of the rows."""
        return f"{len(self)} {self.config.algorithm.source}{self.rows.describe()}"

    def describe_iteration(self) -> str:
        """Rows per iteration."""
        return f"{self.config.algorithm.train_batch_size} {self.config.algorithm.source}"

    def check(self, layout: Layout) -> None:
        """Read every row; the samples of each fit into a micro-batch."""
        self._check_rows(self.rows, "row", layout)
        _ = self.order

    def check_held_out(self, layout: Layout) -> None:
        """Read held-out prompts, and held-out rows, which fit into a micro-batch."""
        super().check_held_out(layout)
        if isinstance(self.held_out_rows, ResponseTable):
            self._check_rows(self.held_out_rows, "held-out row", layout)

    def _check_rows(self, rows: ResponseTable, word: str, layout: Layout) -> None:
        check_lengths(_lengths(rows, word), self.config, layout)
        check_measured(rows.lengths.max(axis=1), rows.largest_ids, rows.location, self.hf_config)

    def examples(self) -> Sequence[Prompt | Sample]:
        """Samples of the first rows."""
        return [sample for samples in self.rows[:EXAMPLES] for sample in samples]

    def source(self, draw: RowSampler, engine: Callable[[], RolloutEngine]) -> Source:
        """The same rows in every pass."""
        return OfflineSource(self.rows, self.rewards, draw)


class Demonstrations(OfflineDataset):
    """Samples to imitate."""

    rewards: ClassVar[tuple[float, ...]] = (1.0,)

    @cached_property
    def _source(self) -> DemonstrationSource:
        return DemonstrationSource(self.config.data, "train")

    @cached_property
    def rows(self) -> ResponseTable:
        """One sample per row: the demonstrations of the environment or of files."""
        s = self.config
        if s.environment is None:
            return self._source.samples(self.tokenizer)
        count = min(MAX_DEMONSTRATIONS, DEMONSTRATIONS_PER_ROW * len(self._demonstrated.rows("train")))
        made = self._demonstrated.demonstrations(count, s.general.seed)
        return environment_demonstrations(made, s.environment_name, s.data, self.tokenizer)

    @property
    def files(self) -> TableRows | None:
        """Those of ``data.train_files``."""
        return self._source.rows if self.config.environment is None else None

    @cached_property
    def val_demonstrations(self) -> Sequence[Sequence[Sample]]:
        """Those of the validation files, all sets together; or right responses to the environment's test prompts."""
        s = self.config
        if not s.has_validation:
            return []
        if s.environment is None:
            return DemonstrationSource(s.data, "test").samples(self.tokenizer)
        shown = [(prompt, right) for prompt, right, _ in self._demonstrated.held_out_preferences()]
        return environment_demonstrations(shown[: s.data.val_max_rows], s.environment_name, s.data, self.tokenizer)

    @property
    def held_out_rows(self) -> Sequence[Sequence[Sample]]:
        """One held-out demonstration in each row."""
        return self.val_demonstrations

    def describe_columns(self) -> str:
        """Columns of demonstrations, and turns that are not trained."""
        if self.config.environment is not None:
            return ""
        _ = self.rows  # which turns are trained is known once they are read
        return self._source.describe_columns()


class Preferences(OfflineDataset):
    """Pairs of a better and a worse response."""

    rewards: ClassVar[tuple[float, ...]] = (1.0, -1.0)

    @cached_property
    def _source(self) -> PreferenceSource:
        return PreferenceSource(self.config.data, "train")

    @cached_property
    def pairs(self) -> PairTable:
        """The pairs of the environment or of files."""
        s = self.config
        if s.environment is None:
            return self._source.pairs(self.tokenizer, extended=s.model.is_reward_model)
        count = min(MAX_PAIRS, len(self._demonstrated.rows("train")))
        return self._made(self._demonstrated.preferences(count, s.general.seed))

    @cached_property
    def val_pairs(self) -> Sequence[Pair]:
        """Pairs of the validation files, or of the environment's test prompts; none if the loss compares no pairs."""
        return [] if self._held_out is None else self._held_out

    @property
    def held_out_rows(self) -> Sequence[Sequence[Sample]]:
        """Both samples of each held-out pair."""
        return [] if self._held_out is None else self._held_out.rows

    @cached_property
    def _held_out(self) -> PairTable | None:
        s = self.config
        if not s.has_validation or "group" not in s.loss.needs:
            return None
        if s.environment is None:
            return PreferenceSource(s.data, "test").pairs(self.tokenizer, extended=s.model.is_reward_model)
        return self._made(self._demonstrated.held_out_preferences()[: s.data.val_max_rows])

    @cached_property
    def val_prompts(self) -> Mapping[str, PromptTable]:
        """Test prompts of the environment; rows of files are pairs, and have no answers to score responses by."""
        return {} if self.config.environment is None else super().val_prompts

    def _made(self, triples: Sequence[tuple[str, str, str]]) -> PairTable:
        """Pairs of (prompt, right response, wrong response) that the environment has made."""
        s = self.config
        is_scored = s.model.is_reward_model
        return environment_preferences(triples, s.environment_name, s.data, self.tokenizer, extended=is_scored)

    def describe_columns(self) -> str:
        """Columns of pairs."""
        return "" if self.config.environment is not None else self._source.describe_columns()

    @property
    def rows(self) -> ResponseTable:
        """Both samples of each pair."""
        return self.pairs.rows

    @property
    def files(self) -> TableRows | None:
        """Those of ``data.train_files``."""
        return self._source.rows if self.config.environment is None else None


def _lengths(rows: ResponseTable, word: str) -> Iterator[tuple[str, list[int]]]:
    """(location of the row, tokens of each of its samples)."""
    for index, lengths in enumerate(rows.lengths.tolist()):
        yield f"{rows.location(index)}: {word} {int(rows.kept[index]) + 1}", lengths
