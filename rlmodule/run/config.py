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
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.callbacks import CALLBACKS
from rlmodule.core.config import at_least, at_most, convert, convert_parts
from rlmodule.core.contract import Advantage, Environment, EnvironmentSource, Loss, Reward, ValueAdvantage
from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.registry import Registry, name_of
from rlmodule.core.renamed import instead_of
from rlmodule.core.types import CRITIC, POLICY, REWARD_MODEL
from rlmodule.data.config import DataConfig
from rlmodule.environments import ENVIRONMENTS
from rlmodule.evaluation.config import ValConfig
from rlmodule.experience.ahead import AheadConfig
from rlmodule.experience.episodes import EpisodesConfig
from rlmodule.experience.replay import ReplayConfig
from rlmodule.loggers import LOGGERS, LoggerConfig
from rlmodule.losses import LOSSES
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.sft import SFT
from rlmodule.models.description import NO_VALUE, SEPARATE, SHARED, ModelConfig
from rlmodule.models.lora import LoraConfig
from rlmodule.optim import OPTIMIZERS
from rlmodule.optim.adamw import AdamW
from rlmodule.optim.parts.config import OptimizerConfig
from rlmodule.rewards.parts.composite import reward_of
from rlmodule.rollout import ROLLOUTS
from rlmodule.rollout.hf import HFRolloutConfig
from rlmodule.rollout.parts.engine import EngineConfig
from rlmodule.rollout.parts.sampling import SamplingConfig
from rlmodule.run.launchers import LAUNCHERS, Launcher
from rlmodule.run.launchers.local import Local
from rlmodule.run.trainer_config import TrainerConfig, read_trainer

STORED = "stored"  # beside the words of algorithm.source: what data.rollouts names
SECTIONS = (
    *(
        "model",
        "environment",
        "data",
        "rollout",
        "algorithm",
        "loss",
        "advantage",
        "reward",
        "batching",
        "optimizer",
        "critic",
        "val",
    ),
    *("warm_start", "trainer", "launcher", "strategy", "callbacks", "command"),
)
AUTO_BUDGET = "auto"  # of batching.max_token_len_per_gpu
NO_ENVIRONMENT = "none"  # rows come from files


@dataclass(frozen=True)
class WarmStartConfig:
    """A short supervised pass over demonstrations that gives a random model some habits to choose from."""

    steps: int = 0  # optimizer steps; 0 for none
    batch_size: int = 64  # demonstrations of one step
    lr: float = 2e-3  # peak learning rate, cosine to a tenth of it
    cache_dir: str | None = (
        None  # folder that keeps the weights for every run with this model, data, environment and seed; one at a time
    )

    def __post_init__(self) -> None:
        at_least("steps", self.steps, 0)
        at_least("batch_size", self.batch_size, 1)
        at_least("lr", self.lr, 0)


@dataclass(frozen=True)
class EnvironmentSizes:
    """Sizes that fit an environment. ``conf/data/environment.yaml`` takes them over; the keys of ``data`` decide."""

    max_prompt_length: int = 1024  # tokens, chat template included
    max_response_length: int = 1024  # tokens
    warm_start_steps: int = 0  # optimizer steps of the warm start


@dataclass(frozen=True)
class GeneralConfig:
    """The keys at the top of the configuration."""

    seed: int = 0  # keys data order, sampling and random weights
    resume: str | None = None  # null, auto, a run directory, or a checkpoint folder
    resume_changed: bool = False  # go on although rows, model, environment or reward are others than before
    run_dir: str | None = None  # where this run writes
    output_root: str = "outputs"  # where runs are kept
    name: str | None = None  # shown for the run, and part of its directory's name; None: what the command line sets
    tags: list[str] = field(default_factory=list)  # your words for it, for loggers
    overrides: list[str] = field(default_factory=list)  # KEY=VALUE of the command line, secrets masked; filled in

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        at_most("seed", self.seed, 2**63 - 1)


@dataclass(frozen=True)
class RunConfig:
    """Everything about a run but the strategy's own options, which only ``train.py`` can read."""

    model: ModelConfig
    general: GeneralConfig = field(default_factory=GeneralConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: Environment | None = None  # None: rows come from files
    episodes: EpisodesConfig = field(default_factory=EpisodesConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: EngineConfig = field(default_factory=HFRolloutConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    ahead: AheadConfig = field(default_factory=AheadConfig)
    val: ValConfig = field(default_factory=ValConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    loss: Loss = field(default_factory=PPOClip)
    advantage: Advantage | None = None  # None where the loss reads none
    reward: Reward | None = None  # None where no response is rewarded
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    fits_budget: bool = False  # whether batching.max_token_len_per_gpu is to be as large as the device allows
    optimizer: OptimizerConfig = field(default_factory=AdamW)
    critic: CriticConfig = field(default_factory=CriticConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launcher: Launcher = field(default_factory=Local)
    backend: str = "single"  # name of the strategy
    num_rows: int | None = None  # rows that trainer.passes goes over, once they are counted
    loggers: Mapping[str, LoggerConfig] = field(default_factory=dict)
    callbacks: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, node: DictConfig) -> RunConfig:
        """Convert every section.

        Raises:
            ConfigError: names the full key of the first thing that is wrong.
        """
        _check_sections(node)
        environment, episodes = _environment(node.environment)  # first, since the data section reads it
        data = convert(DataConfig, node.data, "data")
        algorithm = convert(AlgorithmConfig, node.algorithm, "algorithm")
        model = convert(ModelConfig, node.model, "model")
        sampling, replay, ahead, rollout = _rollout_section(node.rollout)
        loss, imitates = component(LOSSES, node.loss), algorithm.source == DEMONSTRATIONS
        has_advantage = "advantage" in loss.needs and not imitates
        return cls(
            general=convert(GeneralConfig, {k: node[k] for k in GeneralConfig.__dataclass_fields__}, ""),
            model=model,
            data=data,
            sampling=sampling,
            rollout=rollout,
            replay=replay,
            ahead=ahead,
            val=convert(ValConfig, node.val, "val"),
            algorithm=algorithm if data.rollouts is None else algorithm.for_stored_rollouts(),
            loss=loss,
            batching=convert(BatchingConfig, without_auto(node.batching), "batching"),
            fits_budget=node.batching.get("max_token_len_per_gpu") == AUTO_BUDGET,
            optimizer=component(OPTIMIZERS, node.optimizer),
            warm_start=convert(WarmStartConfig, node.warm_start, "warm_start"),
            trainer=read_trainer(node.trainer),
            launcher=component(LAUNCHERS, node.launcher),
            backend=str(node.strategy.get("name")),
            critic=replace(
                convert(CriticConfig, node.critic, "critic", ignore=("optimizer",)),
                optimizer=component(OPTIMIZERS, node.critic.optimizer, "critic.optimizer"),
            ),
            environment=environment,
            episodes=episodes,
            advantage=component(ADVANTAGES, node.advantage) if has_advantage else None,
            # A reward model responds to no prompt.
            reward=None if imitates or model.is_reward_model else reward_of(node.reward),
            loggers=components(LOGGERS, node.get("logger"), "logger"),
            callbacks=components(CALLBACKS, node.callbacks, "callbacks"),
        )

    @property
    def objective(self) -> Objective:
        """What the trained model minimises."""
        return Objective(self.loss, self.algorithm)

    @property
    def dataset(self) -> str:
        """What the run learns from: ``rollouts`` of its policy, ``stored`` ones, or others' responses."""
        return self.algorithm.source if self.data.rollouts is None else STORED

    @property
    def environment_name(self) -> str:
        """Its name in the menu; ``none`` where rows come from files."""
        return NO_ENVIRONMENT if self.environment is None else name_of(type(self.environment))

    @property
    def has_validation(self) -> bool:
        """Whether there are held-out rows."""
        return self.environment is not None or bool(self.data.val_sets)

    @property
    def needs_warm_start(self) -> bool:
        """Whether the model must first learn some habits: random weights, and demonstrations to learn from."""
        is_random = self.model.path is None and self.algorithm.source != DEMONSTRATIONS
        return is_random and self.warm_start.steps > 0

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
            general=replace(self.general, resume=None),
            model=replace(self.model, lora=LoraConfig(), compile=False, value=NO_VALUE),
            data=replace(
                self.data,
                rollouts=None,
                val_files=None,
                completion_key=self.data.completion_key or self._preferred_key,
            ),
            algorithm=AlgorithmConfig(
                source=DEMONSTRATIONS, train_batch_size=warm.batch_size * steps_per_iteration, log_entropy=False
            ),
            loss=SFT(),
            batching=BatchingConfig(mini_batch_size=warm.batch_size),
            ahead=AheadConfig(),
            optimizer=optimizer,
            trainer=replace(
                self.trainer,
                max_epochs=-(-warm.steps // steps_per_iteration),
                passes=None,
                devices="1",
                num_nodes=1,
                num_threads=None,
            ),
            launcher=Local(),
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
    def ranks_pairs_by_reference(self) -> bool:
        """Whether held-out pairs are told apart by a policy and the one that it started from."""
        return self.algorithm.source == PREFERENCES and self.objective.needs_reference

    @property
    def group_size(self) -> int:
        """Samples that come of one row of the data."""
        return {DEMONSTRATIONS: 1, PREFERENCES: 2}.get(self.algorithm.source, self.sampling.n)

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss is of pairs: which of two whole responses is better, whoever drew them."""
        return "group" in self.loss.needs

    @property
    def longest_sample(self) -> int:
        """Tokens that a prompt and its response can have together."""
        return self.data.max_prompt_length + self.sampling.max_response_length

    @property
    def reads_behind_the_end(self) -> bool:
        """Whether the value behind a response that was cut is read, at one position more than its tokens have."""
        return isinstance(self.advantage, ValueAdvantage) and self.advantage.bootstrap_truncated

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
        return self.replay.staleness if self.algorithm.is_sampled and self.data.rollouts is None else 0

    def with_rows(self, num_rows: int) -> RunConfig:
        """The run with as many iterations as ``trainer.passes`` takes; itself where that is not set."""
        if self.trainer.passes is None:
            return self
        counted = replace(self, num_rows=num_rows)
        iterations = math.ceil((counted.rows_of_run or 0) / self.algorithm.train_batch_size)
        return replace(counted, trainer=replace(self.trainer, max_epochs=iterations))

    @property
    def rows_of_run(self) -> int | None:
        """Rows that a run of ``trainer.passes`` takes; None without that key."""
        if self.trainer.passes is None or self.num_rows is None:
            return None
        return math.ceil(self.trainer.passes * self.num_rows)

    def rows_of_iteration(self, iteration: int) -> int:
        """Rows that iteration ``iteration``, from 0, takes: fewer in the last one of ``trainer.passes``."""
        batch, rows = self.algorithm.train_batch_size, self.rows_of_run
        return batch if rows is None else min(batch, rows - iteration * batch)

    def steps_per_iteration(self, samples_per_row: float, name: str, *, replayed: int = 0, iteration: int = 0) -> int:
        """Optimizer steps of a model in an iteration in which it trains.

        Args:
            samples_per_row: samples that a row of the iteration comes to.
            name: of the model.
            replayed: earlier iterations of which it trains again.
            iteration: its number; the last one of ``trainer.passes`` may be shorter.
        """
        rows = self.rows_of_iteration(iteration) + self.algorithm.train_batch_size * replayed
        samples = rows * samples_per_row
        return math.ceil(samples / self.mini_batch_sizes[name]) * self.algorithm.ppo_epochs

    def run_steps(self, samples_per_row: float, name: str) -> int:
        """Optimizer steps of a model in the whole run, none skipped."""
        return sum(
            self.steps_per_iteration(samples_per_row, name, replayed=min(iteration, self.replayed), iteration=iteration)
            for iteration in range(self.trainer.max_epochs)
            if name in self.trained_models(iteration)
        )


def without_auto(batching: DictConfig) -> DictConfig:
    """The section with a number in the place of ``auto``, which is filled in once the model is known."""
    if batching.get("max_token_len_per_gpu") != AUTO_BUDGET:
        return batching
    return OmegaConf.merge(batching, {"max_token_len_per_gpu": BatchingConfig().max_token_len_per_gpu})  # type: ignore[return-value]


def component(registry: Registry[Any], node: Any, key: str | None = None) -> Any:
    """Build the component that a section names from the section's other keys.

    Args:
        registry: registry of the component.
        node: the section.
        key: dotted key of the section; by default the registry's kind, which is the config group.
    """
    return convert(registry.chosen(node, key), node, key or registry.kind, ignore=("name",))


def _rollout_section(node: DictConfig) -> tuple[SamplingConfig, ReplayConfig, AheadConfig, EngineConfig]:
    """One section on the command line: how and when responses are drawn, how long they are kept, the engine's keys."""
    sampling, replay, ahead, engine = convert_parts(
        (SamplingConfig, ReplayConfig, AheadConfig, ROLLOUTS.chosen(node)), node, "rollout", ignore=("name",)
    )
    return sampling, replay, ahead, engine


def _environment(node: DictConfig) -> tuple[Environment | None, EpisodesConfig]:
    """The environment and its limits, without the sizes beside them, which the ``data`` section has read."""
    if node.get("name") == NO_ENVIRONMENT:
        convert(EnvironmentSizes, node, "environment", ignore=("name",))
        return None, EpisodesConfig()
    classes = (ENVIRONMENTS.chosen(node), EpisodesConfig, EnvironmentSizes)
    made, episodes, _ = convert_parts(classes, node, "environment", ignore=("name",))
    return made.environment if isinstance(made, EnvironmentSource) else made, episodes


def components(registry: Registry[Any], node: DictConfig | None, key: str) -> dict[str, Any]:
    """The components of a section that holds several, by name in their order; none where there is no section."""
    if node is None:
        return {}
    names = [str(name) for name in node.keys()]  # noqa: SIM118  mypy takes iteration over a node for one over bytes
    return {name: convert(registry.get(name, key), node[name] or {}, f"{key}.{name}") for name in names}


def _check_sections(node: DictConfig) -> None:
    for name in SECTIONS:
        if not isinstance(node.get(name), Mapping):
            raise ConfigError(
                key=name,
                got=node.get(name),
                because="a run cannot do without this section",
                fix=f"Choose one with {name}=NAME; --help lists the names",
            )
    beside = ("general", "backend", "loggers", "num_rows", "fits_budget", "episodes")
    known = {f for f in RunConfig.__dataclass_fields__ if f not in beside}
    known |= {"strategy", "logger", "command", *GeneralConfig.__dataclass_fields__}
    for key in map(str, node):
        if key not in known:
            raise ConfigError(
                key=key,
                got=OmegaConf.select(node, key),
                because="there is no such section or key",
                fix=instead_of(key) or did_you_mean(key, known),
            )
