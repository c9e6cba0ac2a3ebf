"""One run from settings to result: check, write down, warm start, build the parts, fit.

The parts are made in ``run/build/``. Leaves out the command line (``train.py``) and the start of ranks
(``run/launchers/local.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlmodule.algorithm.objective import Objective
from rlmodule.callbacks.parts.context import RunContext
from rlmodule.checkpoint.state import STATE_FILE, newest_whole, read_manifest, verify
from rlmodule.core.errors import ConfigError
from rlmodule.models.building import parameter_count
from rlmodule.models.compiled import check_compiler
from rlmodule.models.description import SEPARATE, load_model_config, load_tokenizer
from rlmodule.models.recompute import SELECTIVE, check_offload
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.build.data import build_datamodule
from rlmodule.run.build.distributed import init_distributed
from rlmodule.run.build.machine import Machine
from rlmodule.run.build.models import build_module, critic_model
from rlmodule.run.build.provenance import flat, save_config
from rlmodule.run.build.strategy import StrategyChoice, StrategyRegistry
from rlmodule.run.build.trainer import build_trainer, reraise_keyboard_interrupt, silence_warnings
from rlmodule.run.build.warm_start import WarmStart
from rlmodule.run.config import RunConfig
from rlmodule.run.datasets import DATASETS, TrainingDataset
from rlmodule.run.launchers.local import launched_from_outside
from rlmodule.run.plan import ModelSummary, RunPlan
from rlmodule.run.preflight.checks import check
from rlmodule.run.preflight.family import check_families
from rlmodule.run.preflight.layout import check_layout
from rlmodule.run.preflight.teacher import check_teacher
from rlmodule.run.preflight.value_model import check_value_model

AUTO_BACKEND = "auto"


@dataclass
class Run:
    """One run.

    Args:
        config: checked configuration.
        run_dir: where it writes.
        menu: strategies to choose from.
        strategy_node: the strategy section as configured; its keys belong to the chosen strategy.
        is_rank_zero: whether this process writes files and talks.
    """

    config: RunConfig
    run_dir: RunDirectory
    menu: StrategyRegistry
    strategy_node: Mapping[str, Any] = field(default_factory=dict)
    is_rank_zero: bool = True

    @classmethod
    def read(cls, node: DictConfig, run_dir: RunDirectory, menu: StrategyRegistry) -> Run:
        """Convert the configuration.

        Raises:
            ConfigError: the first thing that is wrong, with its full key.
        """
        config = RunConfig.read(node)
        if config.backend == AUTO_BACKEND:
            config = replace(config, backend="single" if Machine(config.trainer).world_size == 1 else "ddp")
        return cls(config, run_dir, menu, node.strategy)

    @property
    def machine(self) -> Machine:
        """What it runs on."""
        return Machine(self.config.trainer)

    @property
    def strategy(self) -> StrategyChoice:
        """How its models are spread."""
        return StrategyChoice(self.config, self.machine, self.menu, self.strategy_node)

    def init_distributed(self) -> None:
        """Under torchrun or srun: meet the other ranks, and learn the run directory from the first."""
        self.run_dir, self.is_rank_zero = init_distributed(self.machine, self.run_dir)

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

    def check(self) -> None:
        """Everything that can be said without weights.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        self.check_strategy()
        config, layout = self.config, self.strategy.layout
        check(config, self.hf_config, layout)
        if config.model.value == SEPARATE:
            check_value_model(config, self.hf_config, load_model_config(critic_model(config), "critic"), layout)
        check_teacher(config, self.hf_config, self.tokenizer)
        check_families(config)
        if config.model.compile:
            check_compiler(self.machine.device)
        if config.model.activation_offload:
            check_offload(self.machine.device)
        self.dataset.check(layout)
        _ = self.dataset.val_prompts  # reading them checks them
        self.resume_from(say=lambda line: print(line) if self.is_rank_zero else None)

    def check_strategy(self) -> None:
        """Refuse a strategy that this machine or this model cannot have.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        strategy, mode = self.strategy.new(), self.config.model.activation_checkpointing
        if mode == SELECTIVE and strategy.gathers_inside_blocks:
            raise ConfigError(
                key="model.activation_checkpointing",
                got=mode,
                because=f"strategy={self.config.backend} gathers weights inside blocks, which cannot be told apart "
                "from what is to be kept",
                fix="Use model.activation_checkpointing=full",
            )
        check_layout(self.hf_config, self.strategy.layout)

    def resume_from(self, say: Callable[[str], object] = lambda line: None) -> Path | None:
        """The checkpoint to go on from; None starts at the beginning.

        Args:
            say: is given a line for every newer checkpoint that is damaged.

        Raises:
            CheckpointError: the checkpoint asked for is damaged.
        """
        wanted = self.config.general.resume
        if not wanted:
            return None
        if Path(wanted).parent.name == "checkpoints":
            verify(Path(wanted))
            return Path(wanted).absolute()
        found, passed_over = newest_whole(self.run_dir.checkpoints)
        for line in passed_over:
            say(f"resume: {line}")
        return found

    def save_config(self, config: str, provenance: str) -> None:
        """Save what is run; the first rank's job."""
        if self.is_rank_zero:
            save_config(self.run_dir, config, provenance, is_resumed=bool(self.config.general.resume))

    # ---- starting weights

    @property
    def _warm_start(self) -> WarmStart:
        return WarmStart(self.config, self.run_dir)

    def warm_start(self, alone: Callable[[Path], None]) -> None:
        """Make the starting weights of a random model, once per run directory.

        Args:
            alone: makes them in a process of its own, where this one has peers.
        """
        if not self.config.needs_warm_start or self._warm_start.is_there:
            return
        if not launched_from_outside():
            self.fit_warm_start()
            return
        if self.is_rank_zero:
            alone(self.run_dir.root)
        dist.barrier()

    def fit_warm_start(self) -> None:
        """Imitate demonstrations with the random model, on one process whatever the layout of the run."""
        inner = self._warm_start.run_dir
        inner.root.mkdir(parents=True, exist_ok=True)
        steps = self.config.warm_start.steps
        print(f"warm start: {steps} steps of imitation, so that there is something to reinforce")
        Run(self.config.for_warm_start(), inner, self.menu).fit()
        self._warm_start.stamp()

    # ---- the run

    def fit(self) -> None:
        """Build the parts and train; every rank of the run calls it."""
        config = self.config
        if config.needs_warm_start:
            started = config.starting_from(str(self._warm_start.run_dir.policy))
            Run(started, self.run_dir, self.menu, self.strategy_node, self.is_rank_zero).fit()
            return
        silence_warnings()
        torch.set_num_threads(
            config.trainer.num_threads or max(1, min(2, os.cpu_count() or 1) // self.machine.num_processes)
        )
        checkpoint = self.resume_from()
        step = None if checkpoint is None else int(read_manifest(checkpoint).entries["step"])
        objective = Objective(config.loss, config.algorithm)
        module, strategy = build_module(config, objective, self.dataset.samples_per_row), self.strategy.new()
        context = self._context(dict(module.models.items()), step)
        callbacks = [made.connect(context) for made in config.callbacks.values()]
        datamodule = build_datamodule(config, self.dataset, objective, strategy, context.metrics_log.begin_iteration)
        trainer = build_trainer(
            config, self.machine, self.run_dir, strategy, callbacks, resumed_step=step, hparams=context.hparams
        )
        with reraise_keyboard_interrupt():
            trainer.fit(
                module,
                datamodule=datamodule,
                ckpt_path=None if checkpoint is None else checkpoint / STATE_FILE,
                weights_only=True,
            )
        if context.is_rank_zero and "report" not in config.callbacks:
            print(f"run finished {self.run_dir.root}")

    def result(self) -> float | None:
        """Accuracy on held-out prompts, or else pairs, at the end, for sweeps; None where none was measured."""
        if not self.run_dir.summary.exists():
            return None
        summary = json.loads(self.run_dir.summary.read_text())
        values = (summary.get(name) for name in ("val_accuracy_end", "val_pair_accuracy_end"))
        return next((float(value) for value in values if value is not None), None)

    def _context(self, models: Mapping[str, nn.Module], resumed_step: int | None) -> RunContext:
        s = self.config
        is_rank_zero = (
            int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")))) == 0
        )
        return RunContext(
            run_dir=self.run_dir.root,
            is_rank_zero=is_rank_zero,
            max_iterations=s.trainer.max_epochs,
            describe=self._plan(models).lines(),
            hparams=flat(
                {
                    "optimizer": asdict(s.optimizer),
                    "algorithm": asdict(s.algorithm),
                    "batching": asdict(s.batching),
                    "rollout": asdict(s.rollout),
                    "seed": s.general.seed,
                }
            ),
            resumed_step=resumed_step,
            tokenizer=self.tokenizer,
            sampling={name: getattr(s.rollout, name) for name in ("temperature", "top_k", "top_p")},
        )

    def _plan(self, models: Mapping[str, nn.Module]) -> RunPlan:
        model, dataset, leading = self.config.model, self.dataset, models[self.config.trained_model]
        name = model.path or str(model.architecture.get("model_type"))
        return RunPlan(
            self.config,
            self.strategy.layout,
            ModelSummary(name, parameter_count(leading), str(leading.loading)),
            self.machine.describe(),
            dataset.describe(),
            dataset.describe_iteration(),
            dataset.describe_held_out(),
            dataset.samples_per_row,
            {name: str(m.loading) for name, m in models.items() if m is not leading and m.loading != leading.loading},
        )
