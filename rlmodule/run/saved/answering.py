"""Prompts answered by a policy, in batches of fixed membership, into a file that may have a part of them already.

Leaves out which file, and which settings make two files the same (``commands/generate.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import Prompt, RewardResult, ScoredSample
from rlmodule.data.config import SPLITS
from rlmodule.data.prompts import PromptTable
from rlmodule.experience.episodes import EpisodeRequest, FinishedEpisode
from rlmodule.experience.sources import with_rewards
from rlmodule.models.description import positions_in_words, positions_of
from rlmodule.records.rows import to_row
from rlmodule.run.config import RunConfig
from rlmodule.run.datasets import Prompts
from rlmodule.run.run import Run
from rlmodule.run.saved.policy_source import LoadedModels
from rlmodule.run.saved.row_file import RowFile

# Of a stored rollout; what only training on it reads.
TOKENS = ("prompt_ids", "response_ids", "logprobs", "loss_mask", "sampling", "group_id")


@dataclass(frozen=True)
class Answering:
    """How prompts are answered.

    Args:
        split: which rows, ``train`` or ``test``.
        greedy: take the likeliest token instead of drawing.
        score: give every response a reward.
        tokens: write token ids and log-probabilities, too.
        batch_size: prompts answered side by side.
    """

    split: str
    greedy: bool
    score: bool
    tokens: bool
    batch_size: int

    def __post_init__(self) -> None:
        one_of("split", self.split, SPLITS)
        at_least("batch_size", self.batch_size, 1)

    def prompts(self, run: Run, dataset: Prompts) -> PromptTable:
        """The rows to answer; reading them checks them.

        Raises:
            RLModuleError: there are none, or one cannot be used.
        """
        config = run.config
        files, origin = config.data.files_of(self.split)
        if config.environment is None and not files:
            raise ConfigError(
                key=origin.key,
                got=[],
                because="there are no prompts to answer",
                fix=f"Use {origin.key}=[prompts.jsonl]",
            )
        table = dataset.load_split(self.split)
        dataset.check_prompts(table)
        limit, longest = positions_of(run.hf_config), int(table.lengths.max()) + config.sampling.max_response_length
        if limit is not None and longest > limit:
            raise ConfigError(
                key="rollout.max_response_length",
                got=config.sampling.max_response_length,
                because=f"with the longest prompt a sample has {longest} tokens, and the model has "
                f"{positions_in_words(run.hf_config)}",
                fix=f"Use rollout.max_response_length={max(1, limit - int(table.lengths.max()))} or less, or shorter "
                "prompts",
            )
        return table

    def write(self, loaded: LoadedModels, table: PromptTable, file: RowFile) -> None:
        """Answer what the file does not have yet, batch by batch."""
        n, started, tokens, new = loaded.run.config.sampling.n, perf_counter(), 0, 0
        total, engine = len(table) * n, loaded.engine()
        episodes = loaded.prompts.episodes
        with closing(engine):
            for first in range(0, len(table), self.batch_size):
                places = range(first, min(first + self.batch_size, len(table)))
                if all(sample_id in file.done for sample_id in range(places.start * n, places.stop * n)):
                    continue
                # All of them, also those that are there: a batch of other members would be computed in other roundings.
                requests = self._requests(places, table.select(places), loaded.run.config)
                for scored in self._scored(episodes.stream(engine(), requests), loaded.run.config):
                    if scored.sample.sample_id not in file.done:
                        file.append(self._row(scored, loaded.tokenizer, loaded.run.config))
                    tokens, new = tokens + len(scored.sample.response_ids), new + 1
                rate = tokens / max(perf_counter() - started, 1e-9)
                print(f"answered     {len(file.done)} of {total} responses, {rate:,.0f} tokens/s", flush=True)

    def _requests(self, places: Sequence[int], prompts: Sequence[Prompt], config: RunConfig) -> list[EpisodeRequest]:
        n, seed = config.sampling.n, config.general.seed
        return [
            EpisodeRequest(prompt, place * n + number, place, seed, greedy=self.greedy)
            for place, prompt in zip(places, prompts, strict=True)
            for number in range(n)
        ]

    def _scored(self, finished: Iterator[FinishedEpisode], config: RunConfig) -> Iterator[ScoredSample]:
        """Each response as it comes; where a reward is asked for, those of a batch together, once all are there."""
        if config.reward is not None:
            yield from with_rewards(list(finished), config.reward)
            return
        for episode in finished:
            yield ScoredSample(episode.sample, episode.scored(episode.reward or RewardResult(None)))

    def _row(self, scored: ScoredSample, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> dict[str, Any]:
        sampling = {name: getattr(config.sampling, name) for name in ("temperature", "top_k", "top_p")}
        whole, prompt = to_row(scored, 0, tokenizer, sampling), scored.sample.prompt
        left_out = {"iteration", "sample_id", *(() if self.tokens else TOKENS)}
        if not self.score:
            left_out |= {"reward", "reward_parts"}
        row: dict[str, Any] = {"sample_id": scored.sample.sample_id, "row": prompt.row}
        row |= {name: value for name, value in whole.items() if name not in left_out}
        row["num_tokens"] = len(scored.sample.response_ids)
        if scored.score.failure is not None:
            row["reward_failure"] = scored.score.failure
        others = {name: value for name, value in prompt.meta.items() if name not in row}
        return row | ({"meta": others} if others else {})
