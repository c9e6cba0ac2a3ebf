"""The policy that a command is about, on one process: of a run, a checkpoint, a Hugging Face folder or a hub name.

Leaves out the settings of the run, which ``saved_settings.py`` has put into the configuration already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlmodule.checkpoint.state import best_of, newest_whole, oldest_first, verify
from rlmodule.core.contract import Strategy
from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.types import CRITIC, POLICY, REWARD_MODEL
from rlmodule.experience.live_engine import LiveEngine
from rlmodule.models.description import SEPARATE, ModelConfig, generation_end_tokens
from rlmodule.models.lora import LoraConfig, is_adapter
from rlmodule.models.policy import PolicyModel
from rlmodule.models.recompute import NONE
from rlmodule.models.value import ValueModel
from rlmodule.records.run_directory import RunDirectory
from rlmodule.rollout.parts.engine import EngineConfig, EngineContext
from rlmodule.run.build.engine import build_engine
from rlmodule.run.build.models import model_specs
from rlmodule.run.build.trainer import silence_warnings
from rlmodule.run.datasets import Prompts
from rlmodule.run.launchers.parts.place import launched_from_outside
from rlmodule.run.preflight.tokens import check_tokenizer
from rlmodule.run.run import Run
from rlmodule.run.saved.saved_settings import CHECKPOINTS, root_of_run
from rlmodule.run.warm_start import WarmStart

# Of a model that only runs forward.
PLAIN: dict[str, Any] = {"compile": False, "activation_checkpointing": NONE, "activation_offload": False}
NEWEST, BEST, EXPORTED, AUTO = "newest", "best", "exported", "auto"


@dataclass(frozen=True)
class PolicySource:
    """Which weights a command is about; without a run those of ``model``."""

    run: str | None = None  # run directory, or one of its checkpoints; its settings are taken as well
    checkpoint: str = AUTO  # of the run: newest, best, exported, or the name of one; auto: see the command

    def place(self, run: Run, order: tuple[str, ...]) -> Place:
        """Where the weights are; nothing is loaded.

        Args:
            run: has the settings.
            order: what ``auto`` means: the first of these that there is.

        Raises:
            RLModuleError: there are no such weights, or the command was given several processes.
        """
        return self.place_for(one_process(run), order)

    def place_for(self, run: Run, order: tuple[str, ...]) -> Place:
        """The same for a command that works on any number of processes, all of which call it; ``run`` has the settings.

        Raises:
            RLModuleError: there are no such weights.
        """
        if self.run is None:
            if self.checkpoint != AUTO:
                raise ConfigError(
                    key="command.checkpoint",
                    got=self.checkpoint,
                    because="a checkpoint is one of a run, and no run is given",
                    fix="Give command.run=RUN_DIR, or leave command.checkpoint out",
                )
            run.unpack_model()
            return Place(run, None, None)
        root = root_of_run(Path(self.run))
        run = replace(run, run_dir=RunDirectory(root))
        given = Path(self.run).absolute()
        if given.parent.name == CHECKPOINTS:
            verify(given)
            return Place(run, root, given)
        if given not in (root, root / CHECKPOINTS):
            return Place(run, root, _model_in(given, root))
        for word in order if self.checkpoint == AUTO else (self.checkpoint,):
            found = _FINDERS[word](root) if word in _FINDERS else _named(root, word)
            if found is not None:
                return Place(run, root, found)
        raise ConfigError(
            key="command.run",
            got=root,
            because=f"the run has no weights to take ({self.checkpoint})",
            fix="Let it save a checkpoint first (callbacks.checkpoint), or give another run",
        )


def _model_in(folder: Path, root: Path) -> Path:
    """A folder in a run directory, which holds a model.

    Raises:
        ConfigError: it does not.
    """
    if (folder / "config.json").is_file() or is_adapter(str(folder)):
        return folder
    raise ConfigError(
        key="command.run",
        got=folder,
        because="it lies in the directory of a run and holds no model",
        fix=f"Give the run ({root}), one of its checkpoints, or a folder in it with an exported model",
    )


def one_process(run: Run) -> Run:
    """The run of a command that works on one process.

    Raises:
        ConfigError: several were asked for.
    """
    if launched_from_outside() or run.machine.world_size > 1:
        raise ConfigError(
            key="trainer.devices",
            got=run.config.trainer.devices,
            because="this command works on one process",
            fix="Leave trainer.devices out, and start it without torchrun or srun",
        )
    return run


def _newest(root: Path) -> Path | None:
    directory = RunDirectory(root)
    found, passed_over = newest_whole(directory.checkpoints, directory.branches)
    for line in passed_over:
        print(line)
    return found


def _best(root: Path) -> Path | None:
    found = best_of(oldest_first(RunDirectory(root).checkpoints))
    if found is not None:
        verify(found)
    return found


def _exported(root: Path) -> Path | None:
    folders = (RunDirectory(root).policy, root / REWARD_MODEL)
    return next((folder for folder in folders if folder.is_dir()), None)


def _named(root: Path, name: str) -> Path | None:
    folder = RunDirectory(root).checkpoints / name
    if not folder.is_dir():
        known = [*_FINDERS, *(path.name for path in oldest_first(folder.parent))]
        raise ConfigError(
            key="command.checkpoint",
            got=name,
            because="the run has no checkpoint of that name",
            fix=did_you_mean(name, known),
        )
    verify(folder)
    return folder


_FINDERS: dict[str, Callable[[Path], Path | None]] = {NEWEST: _newest, BEST: _best, EXPORTED: _exported}


@dataclass(frozen=True, eq=False)
class Place:
    """Weights on disk that a command is about.

    Args:
        run: with the configuration they belong to.
        root: of the run that made them; None where they come from nowhere but ``model``.
        folder: checkpoint or exported model; None for the weights of ``model``.
    """

    run: Run
    root: Path | None
    folder: Path | None

    @property
    def is_checkpoint(self) -> bool:
        """Whether the weights lie in a checkpoint."""
        return self.folder is not None and self.folder.parent.name == CHECKPOINTS

    @property
    def described(self) -> str:
        """For people."""
        model = self.run.config.model
        return str(self.folder or model.path or f"random weights ({model.architecture.get('model_type')})")

    @property
    def began_as(self) -> ModelConfig:
        """The model that the training of the policy began with, which pairs are ranked against.

        Raises:
            ConfigError: the weights are of no run, or its starting weights are not there any more.
        """
        warm = WarmStart(self.run, has_begun=True)
        if self.root is None:
            raise ConfigError(
                key="command.run",
                got=None,
                because=f"pairs are ranked against the policy that training began with, which {self.described} does "
                "not know",
                fix="Give the run that made it, python train.py evaluate RUN, or a folder in it, evaluate RUN/policy",
            )
        if warm.is_needed and not warm.directory.policy.is_dir():
            raise ConfigError(
                key="command.run",
                got=self.root,
                because=f"pairs are ranked against the policy that training began with, and {warm.directory.policy} is "
                "not there any more",
                fix="Put that folder back, or evaluate answers: algorithm=grpo reward=NAME",
            )
        return replace(warm.started().config.model, lora=LoraConfig(), **PLAIN)

    def settled(self) -> Run:
        """The run whose ``model`` is what is loaded first: the exported folder, or what the checkpoint was begun from.

        Raises:
            RLModuleError: the model or its tokenizer cannot be used.
        """
        run = self.run
        if self.is_checkpoint:
            warm = WarmStart(run, has_begun=True)
            run = warm.started() if warm.is_needed and warm.directory.policy.is_dir() else run
        elif self.folder is not None:
            run = replace(run, config=run.config.starting_from(str(self.folder)))
            run = replace(run, config=replace(run.config, model=replace(run.config.model, lora=LoraConfig())))
        model, batching = replace(run.config.model, **PLAIN), run.config.batching
        # How ranks shared rows belongs to training; a process now has whole rows, which may be as long.
        budget = batching.max_token_len_per_gpu * batching.max_sp_size
        batching = replace(batching, max_sp_size=1, max_token_len_per_gpu=budget)
        run = replace(run, config=replace(run.config, model=model, batching=batching))
        hf_config = run.hf_config  # read before the tokenizer: its errors say more of a folder that is no model
        check_tokenizer(run.config.model, run.tokenizer, hf_config)
        return run

    def load(self, *names: str) -> LoadedModels:
        """Load the models of these names, by default the one that the run is about, and the critic where asked for.

        Raises:
            RLModuleError: it cannot be built or read.
        """
        run = self.settled()
        silence_warnings()
        if run.config.trainer.num_threads is not None:
            torch.set_num_threads(run.config.trainer.num_threads)
        specs = model_specs(run.config, run.config.objective)
        strategy = run.strategy.build()
        wanted = names or (run.config.trained_model,)
        models = {name: strategy.build(name, specs[name]) for name in wanted}
        strategy.shard(models)
        if self.is_checkpoint:
            assert self.folder is not None, "a checkpoint is a folder"
            for name in models:
                strategy.load_model(name, self.folder)
        for model in models.values():
            assert isinstance(model, PolicyModel | ValueModel), "a command is about models of a run"
        return LoadedModels(run, strategy, models)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class LoadedModels:
    """Models of a run in this process, ready to be asked.

    Args:
        run: they belong to.
        strategy: holds them.
        models: by name.
    """

    run: Run
    strategy: Strategy
    models: dict[str, PolicyModel | ValueModel]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of all of them."""
        return self.run.tokenizer

    @property
    def prompts(self) -> Prompts:
        """The run's rows as prompts, whatever it trains on; nothing is read yet."""
        return Prompts(self.run.config, self.run.tokenizer, self.run.hf_config)

    def context(self) -> EngineContext:
        """What an engine is told."""
        sampling, strategy, policy = self.run.config.sampling, self.strategy, self.models[POLICY]
        assert isinstance(policy, PolicyModel), "responses are sampled from a policy"
        ends, device = self.prompts.end_tokens, strategy.root_device
        return EngineContext(sampling, ends, self.tokenizer, strategy, device, policy, self.run.run_dir.root)

    def engine(self, config: EngineConfig | None = None) -> LiveEngine:
        """The engine of the run, or another; it has the weights once it is called."""
        made, ends = config or self.run.config.rollout, lambda: self.prompts.end_tokens
        sampling, run_dir = self.run.config.sampling, self.run.run_dir.root
        return build_engine(made, sampling, ends, self.tokenizer, self.strategy, self.models, run_dir)

    def generation(self) -> GenerationConfig:
        """How the policy was sampled from, for those who load it elsewhere."""
        sampling, ends = self.run.config.sampling, self.prompts.end_tokens
        return GenerationConfig(
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_new_tokens=sampling.max_response_length,
            eos_token_id=list(ends.ids) or list(generation_end_tokens(self.run.config.model)) or None,
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
        )


def trained_names(run: Run) -> tuple[str, ...]:
    """Names of the models that a run leaves behind."""
    critic = (CRITIC,) if run.config.model.value == SEPARATE else ()
    return (run.config.trained_model, *critic)


def refuse_reward_model(run: Run, command: str) -> None:
    """A reward model gives no responses.

    Raises:
        ConfigError: the run trains one.
    """
    if run.config.model.is_reward_model:
        raise ConfigError(
            key="model.kind",
            got="reward_model",
            because=f"command={command} samples responses, and a reward model gives none",
            fix="Give a policy",
        )
