"""``command=generate``: responses to prompts as a file of JSON lines; started again after a kill, it goes on.

Sampling is keyed by seed, sample and position, and prompts are answered in batches of fixed membership, so a run that
was stopped and one that was not leave the same file. Leaves out judging a model by its answers (``evaluate``).
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.core.errors import ConfigError
from rlmodule.run.config import RunConfig
from rlmodule.run.datasets import Prompts
from rlmodule.run.digests import digests
from rlmodule.run.file_digests import of_texts
from rlmodule.run.preflight.responses import check_reward_server
from rlmodule.run.run import Run
from rlmodule.run.saved.answering import Answering
from rlmodule.run.saved.policy_source import EXPORTED, NEWEST, Place, PolicySource
from rlmodule.run.saved.policy_source import refuse_reward_model as check_gives_responses
from rlmodule.run.saved.row_file import RowFile
from rlmodule.run.saved.weights_digest import weights_digest


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
        _ = self.answering  # checks its part

    def __call__(self, invocation: Invocation) -> int:
        """Write the file.

        Raises:
            RLModuleError: there are no such weights or prompts, or the file is another command's.
        """
        place = self._checked(self.place(invocation.run, (EXPORTED, NEWEST)))
        run = place.settled()
        dataset = Prompts(run.config, run.tokenizer, run.hf_config)
        table = self.answering.prompts(run, dataset)
        total = len(table) * run.config.sampling.n
        assert self.out is not None, "checked"
        with closing(RowFile.open(Path(self.out), self._settings(run, place))) as file:
            print(f"policy       {place.described}")
            print(f"prompts      {table.describe()}, {run.config.sampling.n} responses to each")
            if file.done:
                print(f"going on     {len(file.done)} of {total} responses are there already")
            if len(file.done) < total:
                self.answering.write(place.load(), table, file)
            file.finish()
            print(f"written      {file.path}  ({len(file.done)} responses)")
        return 0

    @property
    def answering(self) -> Answering:
        """How prompts are answered."""
        return Answering(self.split, self.greedy, self.score, self.tokens, self.batch_size)

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
        check_reward_server(changed)
        return replace(place, run=replace(place.run, config=changed))

    def _settings(self, run: Run, place: Place) -> dict[str, Any]:
        """Everything that the responses depend on, for a file that is gone on with."""
        config = run.config
        files, _ = config.data.files_of(self.split)
        data = replace(config.data, train_files=files)
        of_rows: RunConfig = replace(config, data=data)
        sampling = {f"rollout.{name}": value for name, value in vars(config.sampling).items()}
        found = digests(of_rows, run.hf_config)
        return {
            "weights": weights_digest(place),
            **{name: found[name] for name in ("rows", "environment", "reward")},
            "chat template": of_texts(str(run.tokenizer.chat_template)),
            **sampling,
            "seed": config.general.seed,
            **{f"data.{name}": getattr(data, name) for name in ("max_prompt_length", "overlong_prompt")},
            **{f"command.{name}": getattr(self, name) for name in ("split", "greedy", "score", "tokens", "batch_size")},
        }
