"""What a run learns from: rows that are read and checked before a weight is loaded, then the source made of them.

One class per kind: prompts to respond to and stored rollouts here, given responses in ``offline_datasets.py``; which
one a run has is in ``dataset_kinds.py``. Leaves out what rows look like (``data/``) and how samples are collected
(``experience/sources.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlmodule.algorithm.config import ROLLOUTS
from rlmodule.core.contract import DemonstratedEnvironment, Environment, RolloutEngine, TemplateEnvironment
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, Sample
from rlmodule.data.end_tokens import EndTokens, find_end_tokens
from rlmodule.data.order import RowOrder, order_of
from rlmodule.data.preferences import Pair
from rlmodule.data.prompts import PromptTable, load_prompts
from rlmodule.data.rollouts import RolloutTable, load_rollouts
from rlmodule.data.tables import MemoryTable
from rlmodule.environments.parts.checked_rows import checked_rows
from rlmodule.environments.parts.single_turn import SingleTurnEpisode
from rlmodule.experience.episodes import EpisodeRunner, EpisodesConfig
from rlmodule.experience.sources import RolloutSource, RowSampler, Source, StoredSource
from rlmodule.models.description import generation_end_tokens
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.stored_rollouts import check_rollouts
from rlmodule.run.preflight.turns import check_repeated_episodes, check_turns


@dataclass(eq=False)
class TrainingDataset(ABC):
    """Rows in an order of their own; an iteration takes ``algorithm.train_batch_size`` of them."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    hf_config: PreTrainedConfig

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @property
    def order(self) -> RowOrder:
        """In which order rows come, beside the seed."""
        return RowOrder((len(self),))

    @property
    @abstractmethod
    def samples_per_row(self) -> float:
        """Samples that a row gives, on average."""

    @property
    def group_size(self) -> int | None:
        """Samples that every row gives; None where rows differ."""
        return int(self.samples_per_row)

    @abstractmethod
    def describe(self) -> str:
        """Number and kind of the rows, for the run plan."""

    def describe_columns(self) -> str:
        """For the run's plan: which columns of files are read as what; empty where rows come from no files."""
        return ""

    @abstractmethod
    def describe_iteration(self) -> str:
        """Rows and samples per iteration, for the run plan."""

    @cached_property
    def end_tokens(self) -> EndTokens:
        """What ends a response of the policy."""
        sampling, generation = self.config.sampling, generation_end_tokens(self.config.model)
        chat = self.config.data.chat_format(self.tokenizer)
        return find_end_tokens(chat, generation, sampling.stop_token_ids, sampling.stop)

    @cached_property
    def episodes(self) -> EpisodeRunner:
        """Runs episodes of the environment; rows of files are episodes of one turn."""
        data, environment = self.config.data, self.environment
        return EpisodeRunner(
            SingleTurnEpisode if environment is None else environment.start,
            data.chat_format(self.tokenizer),
            data.max_prompt_length,
            self.config.sampling.max_response_length,
            EpisodesConfig(max_turns=1) if environment is None else self.config.episodes,
            gives_rewards=environment is not None and environment.gives_rewards,
        )

    @cached_property
    def environment(self) -> Environment | None:
        """The environment as it is for this model's chat template; None where rows come from files."""
        environment = self.config.environment
        if not isinstance(environment, TemplateEnvironment):
            return environment
        return environment.for_template(str(self.tokenizer.chat_template or ""))

    @cached_property
    def val_prompts(self) -> Mapping[str, PromptTable]:
        """Held-out prompts to respond to, by validation set; none without such rows, or without a reward function."""
        config = self.config
        if not config.has_validation or config.reward is None:
            return {}
        tables = {name: of_set.load_split("test") for name, of_set in self._by_set().items()}
        for table in tables.values():
            self.check_prompts(table)
        return tables

    def _by_set(self) -> Mapping[str, TrainingDataset]:
        """The data set with the rows of one validation set each, by name."""
        config = self.config
        if config.environment is not None:
            return {"": self}
        return {
            name: replace(self, config=replace(config, data=replace(config.data, val_files=files)))
            for name, files in config.data.val_sets.items()
        }

    @cached_property
    def val_pairs(self) -> Sequence[Pair]:
        """Held-out preference pairs to rank."""
        return []

    @cached_property
    def val_demonstrations(self) -> Sequence[Sequence[Sample]]:
        """Held-out demonstrations to predict, one in each row."""
        return []

    def describe_held_out(self) -> str:
        """Number and kind of the rows that are never trained on, for the run plan; empty where there are none."""
        counts = {
            **{f"prompts{f' of {name}' if name else ''}": len(table) for name, table in self.val_prompts.items()},
            "pairs": len(self.val_pairs),
            "demonstrations": len(self.val_demonstrations),
        }
        n = self.config.val.n
        times = f", {n} answers to each prompt" if n > 1 and self.val_prompts else ""
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) + times

    def describe_sampling(self) -> str:
        """Length and end of responses, for the run plan; empty where none are sampled."""
        if self.config.dataset != ROLLOUTS and not self.val_prompts:
            return ""
        length, ends = self.config.sampling.max_response_length, self.end_tokens.describe(self.tokenizer)
        return f"responses of {length} tokens at most, ended by {ends}"

    @abstractmethod
    def check(self, layout: Layout) -> None:
        """Read every row.

        Raises:
            RLModuleError: a row cannot be used.
        """

    @property
    def held_out_rows(self) -> Sequence[Sequence[Sample]]:
        """The samples of each held-out row with given responses, all validation sets together."""
        return []

    @property
    def held_out_sets(self) -> Mapping[str, Sequence[Sequence[Sample]]]:
        """The same by validation set."""
        sets = self._by_set()
        return {"": self.held_out_rows} if len(sets) == 1 else {name: one.held_out_rows for name, one in sets.items()}

    def check_held_out(self, layout: Layout) -> None:
        """Read every held-out row; given responses fit into a micro-batch.

        Raises:
            RLModuleError: a row cannot be used.
        """
        _ = self.val_prompts  # reading them checks them

    @abstractmethod
    def examples(self) -> Sequence[Prompt | Sample]:
        """Rows whose tokens parity runs borrow for synthetic samples."""

    @abstractmethod
    def source(self, draw: RowSampler, engine: Callable[[], RolloutEngine]) -> Source:
        """What gives the samples of each iteration."""

    def load_split(self, split: str) -> PromptTable:
        """Rows of ``train`` or ``test`` as prompts; read anew at every call.

        Raises:
            RLModuleError: a row cannot be used.
        """
        environment, table = self.environment, None
        if environment is not None:
            name = self.config.environment_name
            table = MemoryTable(f"environment {name} ({split})", checked_rows(environment, name, split))
        return load_prompts(self.config.data, self.tokenizer, split, table)

    def check_prompts(self, prompts: PromptTable) -> None:
        """Check that every row has what the reward function reads, and token ids that the model has.

        Raises:
            DataError: names the first row that does not.
        """
        environment, reward = self.config.environment, self.config.reward
        if reward is not None and (environment is None or not environment.gives_rewards):
            prompts.check(reward.missing_fields)
        prompts.check_ids(self.hf_config.get_text_config().vocab_size)

    @property
    def _demonstrated(self) -> DemonstratedEnvironment:
        """The environment, which shows responses, as ``preflight/rows.py`` has checked."""
        environment = self.environment
        assert isinstance(environment, DemonstratedEnvironment), "checked before a run"
        return environment


class Prompts(TrainingDataset):
    """Prompts that the policy responds to."""

    @cached_property
    def table(self) -> PromptTable:
        """The prompts; reading them checks them."""
        return self.load_split("train")

    def __len__(self) -> int:
        return len(self.table)

    @property
    def samples_per_row(self) -> float:
        """Responses per prompt, ``rollout.n``."""
        return self.config.group_size

    @cached_property
    def order(self) -> RowOrder:
        """Files mixed by weight, or easy rows first."""
        return order_of(self.table.rows, self.table.kept, self.config.data)

    def describe(self) -> str:
        """Number of prompts and their lengths."""
        return self.table.describe()

    def describe_columns(self) -> str:
        """Columns of prompts."""
        return "" if self.config.environment is not None else self.table.describe_columns()

    def describe_iteration(self) -> str:
        """Prompts, responses to each, and samples."""
        prompts, n = self.config.algorithm.train_batch_size, self.config.sampling.n
        return f"{prompts} prompts x {n} responses = {prompts * n} samples"

    def check(self, layout: Layout) -> None:
        """Read every prompt, and find what ends responses; their lengths follow from the configuration."""
        check_repeated_episodes(self.config, layout)
        check_turns(self.config, self.tokenizer, self.hf_config)
        self.check_prompts(self.table)
        _ = self.end_tokens, self.order

    def examples(self) -> Sequence[Prompt | Sample]:
        """The prompts."""
        return self.table

    def source(self, draw: RowSampler, engine: Callable[[], RolloutEngine]) -> Source:
        """Episodes with the current policy."""
        s = self.config
        assert s.reward is not None, "responses that are sampled get rewards"
        return RolloutSource(
            self.table,
            draw,
            s.sampling.n,
            self.episodes,
            engine,
            s.reward,
            s.general.seed,
            greedy_baseline=s.advantage_reads("baseline"),
        )


class StoredRollouts(TrainingDataset):
    """Responses that were sampled and rewarded earlier, by group."""

    @cached_property
    def table(self) -> RolloutTable:
        """The responses; reading them checks them."""
        data = self.config.data
        assert data.rollouts is not None, "this data set is chosen where data.rollouts is set"
        vocab_size = self.hf_config.get_text_config().vocab_size
        return load_rollouts(data.rollouts, data, self.tokenizer, vocab_size)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def samples_per_row(self) -> float:
        """Mean group size; stored groups may differ in size."""
        return len(self.table.lengths) / len(self.table)

    @property
    def group_size(self) -> None:
        """Groups are as large as they were stored."""
        return None

    def describe(self) -> str:
        """Number of responses, groups and files."""
        return self.table.describe()

    def describe_columns(self) -> str:
        """Columns that are not read."""
        return self.table.describe_columns()

    def describe_iteration(self) -> str:
        """Groups per iteration, and about how many samples they have."""
        groups = self.config.algorithm.train_batch_size
        return (
            f"{groups} groups x {self.samples_per_row:g} stored responses = {groups * self.samples_per_row:g} samples"
        )

    def check(self, layout: Layout) -> None:
        """Read every row; each has what the objective needs, and fits into a micro-batch."""
        check_rollouts(self.table, self.config, self.hf_config, layout)

    def examples(self) -> Sequence[Prompt | Sample]:
        """The responses of the first group."""
        rows = self.table.read(self.table.groups[0])
        return [row.scored(sample_id, 0).sample for sample_id, row in enumerate(rows)]

    def source(self, draw: RowSampler, engine: Callable[[], RolloutEngine]) -> Source:
        """Groups in a seeded order."""
        return StoredSource(self.table, draw)
