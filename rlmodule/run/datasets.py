"""What a run learns from: rows that are read and checked before a weight is loaded, then the source made of them.

One class per kind: prompts to answer, stored rollouts, demonstrations to imitate, pairs to tell apart. Leaves out what
rows look like (``data/``) and how samples are collected (``experience/sources.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlmodule.algorithm.config import DEMONSTRATIONS, PREFERENCES, ROLLOUTS
from rlmodule.core.contract import Layout, RolloutEngine
from rlmodule.core.types import Prompt, Sample
from rlmodule.data.demonstrations import DemonstrationSource, task_demonstrations
from rlmodule.data.preferences import Pair, PreferenceSource, task_preferences
from rlmodule.data.prompts import PromptTable, load_prompts
from rlmodule.data.rollouts import RolloutTable, load_rollouts
from rlmodule.experience.sources import OfflineSource, RolloutSource, RowSampler, Source, StoredSource
from rlmodule.run.config import STORED, RunConfig
from rlmodule.run.preflight.lengths import check_lengths
from rlmodule.run.preflight.stored_rollouts import check_rollouts
from rlmodule.run.preflight.tokens import check_samples

SYNTHETIC_DEMONSTRATIONS, SYNTHETIC_PAIRS = 16384, 4096  # drawn from a built-in task that is asked for some


@dataclass(eq=False)
class TrainingDataset(ABC):
    """Rows in an order of their own; an iteration takes ``algorithm.train_batch_size`` of them."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    hf_config: PreTrainedConfig

    @abstractmethod
    def __len__(self) -> int:
        """Rows."""

    @property
    @abstractmethod
    def samples_per_row(self) -> float:
        """Samples that a row comes to, on average."""

    @abstractmethod
    def describe(self) -> str:
        """One line for the run's plan: what is there."""

    def describe_columns(self) -> str:
        """For the run's plan: which columns of files are read as what; empty where rows come from no files."""
        return ""

    @abstractmethod
    def describe_iteration(self) -> str:
        """One line for the run's plan: what an iteration takes of it."""

    @cached_property
    def val_prompts(self) -> Sequence[Prompt]:
        """Held-out prompts to answer; none where the data has none, or nobody judges answers."""
        s = self.config
        if not s.data.has_validation or s.reward is None:
            return []
        prompts = load_prompts(s.data, self.tokenizer, "test", s.task)
        prompts.check(s.reward.missing_fields)
        prompts.check_ids(self.hf_config.get_text_config().vocab_size)
        return prompts

    @cached_property
    def val_pairs(self) -> Sequence[Pair]:
        """Held-out pairs to tell apart."""
        return []

    def describe_held_out(self) -> str:
        """For the run's plan: what is never trained on; empty where there is nothing."""
        counts = {"prompts": len(self.val_prompts), "pairs": len(self.val_pairs)}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    @abstractmethod
    def check(self, layout: Layout) -> None:
        """Read every row.

        Raises:
            RLModuleError: one cannot be used.
        """

    @abstractmethod
    def examples(self) -> Sequence[Prompt | Sample]:
        """Rows that lend their tokens to made-up samples."""

    @abstractmethod
    def source(self, draw: RowSampler, engine: Callable[[], RolloutEngine]) -> Source:
        """What gives the samples of each iteration."""


class Prompts(TrainingDataset):
    """Prompts that the policy answers."""

    @cached_property
    def table(self) -> PromptTable:
        """The prompts; reading them checks them."""
        return load_prompts(self.config.data, self.tokenizer, "train", self.config.task)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def samples_per_row(self) -> float:
        """Every prompt is answered so often."""
        return self.config.group_size

    def describe(self) -> str:
        """Prompts and their lengths."""
        return self.table.describe()

    def describe_columns(self) -> str:
        """Columns of prompts."""
        return "" if self.config.task is not None else self.table.describe_columns()

    def describe_iteration(self) -> str:
        """Prompts, responses, samples."""
        prompts, n = self.config.algorithm.train_batch_size, self.config.rollout.n
        return f"{prompts} prompts x {n} responses = {prompts * n} samples"

    def check(self, layout: Layout) -> None:
        """Every prompt can be judged; lengths of samples follow from the settings, which were checked."""
        assert self.config.reward is not None, "rollouts are judged"
        self.table.check(self.config.reward.missing_fields)
        self.table.check_ids(self.hf_config.get_text_config().vocab_size)

    def examples(self) -> Sequence[Prompt | Sample]:
        """The prompts."""
        return self.table

    def source(self, draw: RowSampler, engine: Callable[[], RolloutEngine]) -> Source:
        """Rollouts of the current policy."""
        s = self.config
        assert s.reward is not None, "rollouts are judged"
        return RolloutSource(
            self.table,
            draw,
            s.rollout.n,
            engine,
            s.reward,
            s.general.seed,
            greedy_baseline=s.advantage_reads("baseline"),
        )


class OfflineDataset(TrainingDataset):
    """Responses that somebody wrote, one row after the other."""

    rewards: ClassVar[tuple[float, ...]]  # of the samples of every row

    @property
    @abstractmethod
    def rows(self) -> Sequence[Sequence[Sample]]:
        """The samples of each row; reading them checks them."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def samples_per_row(self) -> float:
        """Every row has as many."""
        return self.config.group_size

    def describe(self) -> str:
        """How many."""
        return f"{len(self)} {self.config.algorithm.source}"

    def describe_iteration(self) -> str:
        """How many at a time."""
        return f"{self.config.algorithm.train_batch_size} {self.config.algorithm.source}"

    def check(self, layout: Layout) -> None:
        """None is longer than a micro-batch, or than the model can read."""
        check_lengths(_lengths(self.rows, "row"), self.config, layout)
        check_samples((sample for samples in self.rows for sample in samples), self.hf_config)

    def examples(self) -> Sequence[Prompt | Sample]:
        """All of them."""
        return [sample for samples in self.rows for sample in samples]

    def source(self, draw: RowSampler, engine: Callable[[], RolloutEngine]) -> Source:
        """The same rows again and again."""
        return OfflineSource(self.rows, self.rewards, draw)


class Demonstrations(OfflineDataset):
    """Samples to imitate."""

    rewards: ClassVar[tuple[float, ...]] = (1.0,)

    @cached_property
    def _source(self) -> DemonstrationSource:
        return DemonstrationSource(self.config.data, "train")

    @cached_property
    def samples(self) -> Sequence[Sample]:
        """The demonstrations of a task or of files."""
        s = self.config
        if s.task is not None:
            return task_demonstrations(s.task, SYNTHETIC_DEMONSTRATIONS, s.general.seed, s.data, self.tokenizer)
        return self._source.samples(self.tokenizer)

    def describe_columns(self) -> str:
        """Columns of demonstrations, and turns that are not trained."""
        if self.config.task is not None:
            return ""
        _ = self.samples  # which turns are trained is known once they are read
        return self._source.describe_columns()

    @cached_property
    def rows(self) -> Sequence[Sequence[Sample]]:
        """Each by itself."""
        return [(sample,) for sample in self.samples]


class Preferences(OfflineDataset):
    """Pairs of a better and a worse response."""

    rewards: ClassVar[tuple[float, ...]] = (1.0, -1.0)

    @cached_property
    def _source(self) -> PreferenceSource:
        return PreferenceSource(self.config.data, "train")

    @cached_property
    def pairs(self) -> Sequence[Pair]:
        """The pairs of a task or of files."""
        s = self.config
        if s.task is None:
            return self._to_score(self._source.pairs(self.tokenizer))
        made = s.task.preferences(SYNTHETIC_PAIRS, s.general.seed)
        return self._to_score(task_preferences(made, s.data, self.tokenizer))

    @cached_property
    def val_pairs(self) -> Sequence[Pair]:
        """Those of the files for validation, or of a task's test prompts; none for a loss that compares no pairs."""
        s = self.config
        if not s.data.has_validation or "group" not in s.loss.needs:
            return []
        if s.task is None:
            return self._to_score(PreferenceSource(s.data, "test").pairs(self.tokenizer))
        made = s.task.held_out_preferences()[: s.data.val_max_rows]
        return self._to_score(task_preferences(made, s.data, self.tokenizer))

    @cached_property
    def val_prompts(self) -> Sequence[Prompt]:
        """Those of a task; rows of files are pairs, and nobody knows answers to their prompts."""
        return [] if self.config.task is None else super().val_prompts

    def describe_columns(self) -> str:
        """Columns of pairs."""
        return "" if self.config.task is not None else self._source.describe_columns()

    def _to_score(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """As the model wants them; a reward model gives its score at the place after the end."""
        if not self.config.model.is_reward_model:
            return pairs
        return [Pair(pair.chosen.extended_by_one(), pair.rejected.extended_by_one()) for pair in pairs]

    @cached_property
    def rows(self) -> Sequence[Sequence[Sample]]:
        """Both of each pair."""
        return [pair.samples for pair in self.pairs]

    def check(self, layout: Layout) -> None:
        """The same of held-out pairs."""
        super().check(layout)
        held_out = [pair.samples for pair in self.val_pairs]
        check_lengths(_lengths(held_out, "held-out row"), self.config, layout)
        check_samples((sample for samples in held_out for sample in samples), self.hf_config)


class StoredRollouts(TrainingDataset):
    """Responses that were sampled and judged earlier, by group."""

    @cached_property
    def table(self) -> RolloutTable:
        """The responses; reading them checks them."""
        data = self.config.data
        assert data.rollouts is not None, "somebody named them"
        vocab_size = self.hf_config.get_text_config().vocab_size
        return load_rollouts(data.rollouts, data, self.tokenizer, vocab_size)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def samples_per_row(self) -> float:
        """Groups may differ in size."""
        return len(self.table.lengths) / len(self.table)

    def describe(self) -> str:
        """Responses, groups, files."""
        return self.table.describe()

    def describe_columns(self) -> str:
        """Columns that are not read."""
        return self.table.describe_columns()

    def describe_iteration(self) -> str:
        """Groups and about how many samples they come to."""
        groups = self.config.algorithm.train_batch_size
        return (
            f"{groups} groups x {self.samples_per_row:g} stored responses = {groups * self.samples_per_row:g} samples"
        )

    def check(self, layout: Layout) -> None:
        """Every row has what the objective asks for, and fits."""
        check_rollouts(self.table, self.config, self.hf_config, layout)

    def examples(self) -> Sequence[Prompt | Sample]:
        """The responses of the first group."""
        rows = self.table.read(self.table.groups[0])
        return [row.scored(sample_id, 0).sample for sample_id, row in enumerate(rows)]

    def source(self, draw: RowSampler, engine: Callable[[], RolloutEngine]) -> Source:
        """Groups in a seeded order."""
        return StoredSource(self.table, draw)


def _lengths(rows: Sequence[Sequence[Sample]], word: str) -> Iterator[tuple[str, list[int]]]:
    """(location of the row, tokens of each of its samples)."""
    prompts = ((samples[0].prompt, samples) for samples in rows)
    return ((f"{p.location}: {word} {p.row + 1}", [sample.meta.length for sample in s]) for p, s in prompts)


DATASETS: Mapping[str, type[TrainingDataset]] = {
    ROLLOUTS: Prompts,
    STORED: StoredRollouts,
    DEMONSTRATIONS: Demonstrations,
    PREFERENCES: Preferences,
}
