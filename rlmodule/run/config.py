"""The configuration of a run as frozen dataclasses: every section converted and checked before anything is loaded.

Leaves out Hydra (``train.py``), and checks that need two sections or the model's shape (``run/preflight/``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlmodule.advantages import ADVANTAGES
from rlmodule.algorithm.config import DEMONSTRATIONS, PREFERENCES, AlgorithmConfig
from rlmodule.algorithm.critic import CriticConfig
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.callbacks import CALLBACKS
from rlmodule.core.config import at_least, convert, more_than, one_of
from rlmodule.core.contract import Advantage, Loss, Reward, Task
from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.registry import Registry
from rlmodule.core.types import CRITIC, POLICY, REWARD_MODEL
from rlmodule.data.prompts import DataConfig
from rlmodule.environments import TASKS
from rlmodule.losses import LOSSES
from rlmodule.losses.sft import SFT
from rlmodule.models.description import NO_VALUE, SEPARATE, SHARED, ModelConfig
from rlmodule.models.lora import LoraConfig
from rlmodule.optim import OPTIMIZERS
from rlmodule.optim.adamw import AdamW
from rlmodule.optim.parts.config import OptimizerConfig
from rlmodule.rewards import REWARDS
from rlmodule.rollout import ROLLOUTS
from rlmodule.rollout.hf import HFRolloutConfig

TRAIN, PARITY = "train", "parity"
STORED = "stored"  # beside the words of algorithm.source: what data.rollouts names
LOGGERS = ("tensorboard", "none")


@dataclass(frozen=True)
class TrainerConfig:
    """How long, and on what."""

    max_epochs: int = 70  # iterations; one iteration (rollouts, then training on them) is one epoch
    devices: str = "1"  # processes on this machine; auto for every accelerator there is
    num_nodes: int = 1  # machines
    accelerator: str = "auto"  # auto, cpu, gpu, ...
    num_threads: int | None = None  # CPU threads of one process
    max_skipped_in_a_row: int = 10  # stop after that many steps in a row without a finite gradient norm

    def __post_init__(self) -> None:
        at_least("max_epochs", self.max_epochs, 1)
        at_least("num_nodes", self.num_nodes, 1)
        at_least("max_skipped_in_a_row", self.max_skipped_in_a_row, 1)
        one_of("accelerator", self.accelerator, ("auto", "cpu", "gpu", "cuda", "mps", "npu", "xpu"))
        if self.num_threads is not None:
            at_least("num_threads", self.num_threads, 1)
        if self.devices != "auto" and not (self.devices.isdigit() and int(self.devices) >= 1):
            raise ConfigError(
                key="devices",
                got=self.devices,
                because="the number of processes must be a whole number of at least 1, or auto",
                fix="Use trainer.devices=1",
            )


@dataclass(frozen=True)
class WarmStartConfig:
    """A short supervised pass over the task's demonstrations that gives a random model some habits to choose from."""

    steps: int = 0  # optimizer steps; 0 for none
    batch_size: int = 64  # demonstrations of one step
    lr: float = 2e-3  # peak learning rate, cosine to a tenth of it
    cache_dir: str | None = (
        None  # folder that keeps the weights for every run with this model, data and seed; one at a time
    )

    def __post_init__(self) -> None:
        at_least("steps", self.steps, 0)
        at_least("batch_size", self.batch_size, 1)
        at_least("lr", self.lr, 0)


@dataclass(frozen=True)
class ParityConfig:
    """What ``task=parity`` compares, and how closely."""

    layouts: list[str] = field(default_factory=list)  # names of layouts to compare; empty for all
    steps: int = 5  # optimizer steps
    samples_per_step: int = 16  # samples of one step; the last step has a single one
    max_length: int = 64  # tokens of the longest sample; a micro-batch holds twice as many
    tolerance: float = 1e-5  # largest relative difference of loss, gradient norm and every metric
    parameter_tolerance: float = 1e-4  # largest relative difference of every weight after the last step
    timeout: float = 600.0  # seconds one layout may take before it counts as hanging

    def __post_init__(self) -> None:
        at_least("steps", self.steps, 2)
        at_least("samples_per_step", self.samples_per_step, 2)
        at_least("longest", self.max_length, 4)
        more_than("timeout", self.timeout, 0)


@dataclass(frozen=True)
class GeneralConfig:
    """The keys at the top of the configuration."""

    task: str = TRAIN  # train, or parity: show that every layout gives the same numbers
    seed: int = 0  # keys data order, sampling and random weights
    resume: str | None = None  # null, auto, a run directory, or a checkpoint folder
    run_dir: str | None = None  # where this run writes
    output_root: str = "outputs"  # where runs are kept

    def __post_init__(self) -> None:
        one_of("task", self.task, (TRAIN, PARITY))


@dataclass(frozen=True)
class RunConfig:
    """Everything about a run but the strategy's own options, which only ``train.py`` can read."""

    general: GeneralConfig
    model: ModelConfig
    data: DataConfig
    rollout: HFRolloutConfig
    algorithm: AlgorithmConfig
    loss: Loss
    batching: BatchingConfig
    optimizer: OptimizerConfig
    warm_start: WarmStartConfig
    trainer: TrainerConfig
    backend: str
    parity: ParityConfig = field(default_factory=ParityConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    task: Task | None = None
    advantage: Advantage | None = None
    reward: Reward | None = None
    logger: str = "tensorboard"
    callbacks: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, node: DictConfig) -> RunConfig:
        """Convert every section.

        Raises:
            ConfigError: names the full key of the first thing that is wrong.
        """
        _check_sections(node)
        data = convert(DataConfig, node.data, "data")
        logger = str(node.logger.get("name"))
        if logger not in LOGGERS:
            raise ConfigError(
                key="logger", got=logger, because="no logger has that name", fix=did_you_mean(logger, LOGGERS)
            )
        algorithm = convert(AlgorithmConfig, node.algorithm, "algorithm")
        model = convert(ModelConfig, node.model, "model")
        loss, imitates = component(LOSSES, node.loss), algorithm.source == DEMONSTRATIONS
        has_advantage = "advantage" in loss.needs and not imitates
        return cls(
            general=convert(
                GeneralConfig, {k: node[k] for k in ("task", "seed", "resume", "run_dir", "output_root")}, ""
            ),
            model=model,
            data=data,
            rollout=component(ROLLOUTS, node.rollout),
            algorithm=algorithm if data.rollouts is None else algorithm.for_stored_rollouts(),
            loss=loss,
            batching=convert(BatchingConfig, node.batching, "batching"),
            optimizer=component(OPTIMIZERS, node.optimizer),
            warm_start=convert(WarmStartConfig, node.warm_start, "warm_start"),
            trainer=convert(TrainerConfig, node.trainer, "trainer"),
            backend=str(node.strategy.get("name")),
            parity=convert(ParityConfig, node.parity, "parity"),
            critic=replace(
                convert(CriticConfig, node.critic, "critic", ignore=("optimizer",)),
                optimizer=component(OPTIMIZERS, node.critic.optimizer, "critic.optimizer"),
            ),
            task=None
            if data.task is None
            else convert(TASKS.get(data.task, "data.task"), data.task_args, "data.task_args"),
            advantage=component(ADVANTAGES, node.advantage) if has_advantage else None,
            # A reward model answers no prompt.
            reward=None if imitates or model.is_reward_model else component(REWARDS, node.reward),
            logger=logger,
            callbacks={
                name: convert(CALLBACKS.get(name, "callbacks"), node.callbacks[name] or {}, f"callbacks.{name}")
                for name in node.callbacks
            },
        )

    @property
    def dataset(self) -> str:
        """What the run learns from: ``rollouts`` of its policy, ``stored`` ones, or others' responses."""
        return self.algorithm.source if self.data.rollouts is None else STORED

    @property
    def needs_warm_start(self) -> bool:
        """Whether the model must first learn some habits: random weights, and demonstrations to learn from."""
        is_random = self.model.path is None and self.algorithm.source != DEMONSTRATIONS
        return is_random and self.warm_start.steps > 0 and self.general.task == TRAIN

    def for_warm_start(self) -> RunConfig:
        """The supervised run that makes the starting weights.

        Nothing in it depends on how the main run is cut, so every layout starts from the same weights, bit for bit.
        """
        warm = self.warm_start
        steps_per_iteration = min(10, warm.steps)
        optimizer = AdamW(
            lr=warm.lr,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            warmup_steps=min(20, warm.steps // 2),
            schedule="cosine",
            min_lr_ratio=0.1,
            total_steps=warm.steps,
        )
        return replace(
            self,
            model=replace(self.model, lora=LoraConfig(), compile=False, value=NO_VALUE),
            data=replace(self.data, rollouts=None, completion_key=self.data.completion_key or self._preferred_key),
            algorithm=AlgorithmConfig(
                source=DEMONSTRATIONS, train_batch_size=warm.batch_size * steps_per_iteration, log_entropy=False
            ),
            loss=SFT(),
            batching=BatchingConfig(mini_batch_size=warm.batch_size),
            optimizer=optimizer,
            trainer=replace(
                self.trainer,
                max_epochs=-(-warm.steps // steps_per_iteration),
                devices="1",
                num_nodes=1,
                num_threads=None,
            ),
            backend="single",
            advantage=None,
            reward=None,
            callbacks={
                # The weights it makes are what the run starts from, whatever the run itself leaves behind.
                "export": CALLBACKS.get("export")(),
                **{name: self.callbacks[name] for name in ("metrics", "progress", "export") if name in self.callbacks},
            },
        )

    @property
    def _preferred_key(self) -> str:
        """Column of what is worth imitating where rows are pairs; elsewhere empty, as the format says."""
        return self.data.chosen_key if self.algorithm.source == PREFERENCES else ""

    def starting_from(self, path: str) -> RunConfig:
        """The same run from the weights (and the tokenizer) in a folder."""
        return replace(self, model=replace(self.model, path=path, architecture={}, tokenizer=None))

    @property
    def group_size(self) -> int:
        """Samples that come of one row of the data."""
        return {DEMONSTRATIONS: 1, PREFERENCES: 2}.get(self.algorithm.source, self.rollout.n)

    @property
    def longest_sample(self) -> int:
        """Tokens that a prompt and its response can have together."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    def advantage_reads(self, name: str) -> bool:
        """Whether there is an estimator that reads the field ``name`` of AdvantageInputs."""
        return self.advantage is not None and name in self.advantage.needs

    @property
    def value_model(self) -> str | None:
        """Name of the model that says values, if any does."""
        return {NO_VALUE: None, SHARED: POLICY, SEPARATE: CRITIC}[self.model.value]

    @property
    def trained_model(self) -> str:
        """Name of the model that a run is about."""
        return REWARD_MODEL if self.model.is_reward_model else POLICY

    @property
    def mini_batch_sizes(self) -> dict[str, int]:
        """Name of each model that trains -> samples of one of its optimizer steps."""
        size = self.batching.mini_batch_size
        sizes = {self.trained_model: size}
        return sizes | {CRITIC: self.critic.mini_batch_size or size} if self.model.value == SEPARATE else sizes

    def trained_models(self, iteration: int) -> dict[str, int]:
        """The same for one iteration: while the critic warms up it trains alone."""
        sizes = self.mini_batch_sizes
        if self.model.value == SEPARATE and iteration < self.critic.warmup_iterations:
            del sizes[POLICY]
        return sizes

    @property
    def replayed(self) -> int:
        """Iterations whose rollouts are trained on again, once there are as many."""
        return self.rollout.staleness if self.algorithm.is_sampled and self.data.rollouts is None else 0

    def steps_per_iteration(self, samples_per_row: float, name: str, *, replayed: int = 0) -> int:
        """Optimizer steps of a model in an iteration in which it trains.

        Args:
            samples_per_row: samples that a row of the iteration comes to.
            name: of the model.
            replayed: earlier iterations of which it trains again.
        """
        samples = self.algorithm.train_batch_size * samples_per_row * (1 + replayed)
        return math.ceil(samples / self.mini_batch_sizes[name]) * self.algorithm.ppo_epochs

    def run_steps(self, samples_per_row: float, name: str) -> int:
        """Optimizer steps of a model in the whole run, none skipped."""
        return sum(
            self.steps_per_iteration(samples_per_row, name, replayed=min(iteration, self.replayed))
            for iteration in range(self.trainer.max_epochs)
            if name in self.trained_models(iteration)
        )


def component(registry: Registry[Any], node: DictConfig, key: str | None = None) -> Any:
    """Build the component that a section names from the section's other keys.

    Args:
        registry: registry of the component.
        node: the section.
        key: dotted key of the section; by default the registry's kind, which is the config group.
    """
    key = key or registry.kind
    name = node.get("name")
    if name is None:
        raise ConfigError(
            key=f"{key}.name",
            got=None,
            because=f"no {registry.kind} is chosen",
            fix=did_you_mean("", registry.names()),
        )
    return convert(registry.get(str(name), key), node, key, ignore=("name",))


def _check_sections(node: DictConfig) -> None:
    known = {f for f in RunConfig.__dataclass_fields__ if f not in ("general", "task", "backend")}
    known |= {"strategy", *GeneralConfig.__dataclass_fields__}
    for name in node:
        if str(name) not in known:
            raise ConfigError(
                key=str(name),
                got=OmegaConf.select(node, str(name)),
                because="there is no such section or key",
                fix=did_you_mean(str(name), known),
            )
