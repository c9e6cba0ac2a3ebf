"""``command=generate``: responses to prompts as a file of JSON lines; started again after a kill, it goes on.

Sampling is keyed by seed, sample and position, and prompts are answered in batches of fixed membership, so a run that
was stopped and one that was not leave the same file. Leaves out judging a model by its answers (``evaluate``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from rlmodule.callbacks.samples import to_row
from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.commands.parts.policy_source import EXPORTED, NEWEST, LoadedModels, Place, PolicySource
from rlmodule.commands.parts.policy_source import refuse_reward_model as check_gives_responses
from rlmodule.commands.parts.row_file import RowFile
from rlmodule.commands.parts.weights_digest import weights_digest
from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import Prompt, RewardResult, ScoredSample
from rlmodule.data.config import SPLITS
from rlmodule.data.prompts import PromptTable
from rlmodule.experience.episodes import EpisodeRequest, FinishedEpisode
from rlmodule.experience.sources import with_rewards
from rlmodule.models.description import positions_in_words, positions_of
from rlmodule.run.config import RunConfig
from rlmodule.run.datasets import Prompts
from rlmodule.run.digests import digests
from rlmodule.run.run import Run

# Of a stored rollout; what only training on it reads.
TOKENS = ("prompt_ids", "response_ids", "logprobs", "loss_mask", "sampling", "group_id")


@COMMANDS.register
@dataclass(frozen=True)
class Generate(PolicySource, Command):
    """Answer every prompt ``rollout.n`` times; ``auto`` is the exported policy, or else the newest checkpoint."""

    has_run_dir: ClassVar[bool] = False

    out: str | None = None  # .jsonl file to write, a line per response; one that is there is gone on with
    split: str = "train"  # train (data.train_files) or test (data.val_files, or the environment's held-out rows)
    greedy: bool = False  # take the likeliest token instead of drawing
    score: bool = False  # give every response a reward, by reward
    tokens: bool = False  # write token ids and log-probabilities, too: what data.rollouts trains on
    batch_size: int = 64  # prompts answered side by side; what a kill loses at most

    def __post_init__(self) -> None:
        one_of("split", self.split, SPLITS)
        at_least("batch_size", self.batch_size, 1)

    def __call__(self, invocation: Invocation) -> int:
        """Write the file.

        Raises:
            RLModuleError: there are no such weights or prompts, or the file is another command's.
        """
        place = self._checked(self.place(invocation, (EXPORTED, NEWEST)))
        run = place.settled()
        dataset = Prompts(run.config, run.tokenizer, run.hf_config)
        table = self._prompts(run, dataset)
        total = len(table) * run.config.sampling.n
        assert self.out is not None, "checked"
        with closing(RowFile.open(Path(self.out), self._settings(run, place))) as file:
            print(f"policy       {place.described}")
            print(f"prompts      {table.describe()}, {run.config.sampling.n} responses to each")
            if file.done:
                print(f"going on     {len(file.done)} of {total} responses are there already")
            if len(file.done) < total:
                self._answer(place.load(), table, file)
            file.finish()
            print(f"written      {file.path}  ({len(file.done)} responses)")
        return 0

    def _checked(self, place: Place) -> Place:
        """The same, with the settings that this command has its own way with.

        Raises:
            ConfigError: a setting that makes no sense here.
        """
        config = place.run.config
        check_gives_responses(place.run, "generate")
        if self.out is None:
            raise ConfigError(
                key="command.out",
                got=None,
                because="the file to write is not named",
                fix="Use command.out=answers.jsonl",
            )
        if self.greedy and config.sampling.n > 1:
            raise ConfigError(
                key="rollout.n",
                got=config.sampling.n,
                because="greedy responses to one prompt are all the same",
                fix="Use rollout.n=1, or command.greedy=false",
            )
        if self.score and config.reward is None:
            raise ConfigError(
                key="command.score",
                got=True,
                because="the run has no reward function (it imitates demonstrations)",
                fix="Leave it out, or give no command.run and choose reward=NAME",
            )
        changed = replace(config, reward=config.reward if self.score else None)
        return replace(place, run=replace(place.run, config=changed))

    def _prompts(self, run: Run, dataset: Prompts) -> PromptTable:
        """The rows to answer; reading them checks them.

        Raises:
            RLModuleError: there are none, or one cannot be used.
        """
        config = run.config
        files, origin, _ = config.data.files_of(self.split)
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

    def _settings(self, run: Run, place: Place) -> dict[str, Any]:
        """Everything that the responses depend on, for a file that is gone on with."""
        config = run.config
        files, _, _ = config.data.files_of(self.split)
        data = replace(config.data, train_files=files)
        of_rows: RunConfig = replace(config, data=data)
        sampling = {f"rollout.{name}": value for name, value in vars(config.sampling).items()}
        found = digests(of_rows, run.hf_config)
        return {
            "weights": weights_digest(place),
            **{name: found[name] for name in ("rows", "environment", "reward")},
            **sampling,
            "seed": config.general.seed,
            **{f"data.{name}": getattr(data, name) for name in ("max_prompt_length", "overlong_prompt")},
            **{f"command.{name}": getattr(self, name) for name in ("split", "greedy", "score", "tokens", "batch_size")},
        }

    def _answer(self, loaded: LoadedModels, table: PromptTable, file: RowFile) -> None:
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
            yield ScoredSample(episode.sample, episode.reward or RewardResult(None))

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
