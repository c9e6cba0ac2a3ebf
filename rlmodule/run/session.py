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
from rlmodule.callbacks.parts.run_context import RunContext
from rlmodule.checkpoint.state import STATE_FILE, newest_whole, read_manifest, verify
from rlmodule.core.errors import ConfigError
from rlmodule.models.building import parameter_count
from rlmodule.models.compiled import check_compiler
from rlmodule.models.description import SEPARATE, load_model_config, load_tokenizer
from rlmodule.models.recompute import SELECTIVE, check_offload
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.build.data import new_datamodule
from rlmodule.run.build.machine import Machine
from rlmodule.run.build.models import critic_model, new_module
from rlmodule.run.build.peers import join_peers
from rlmodule.run.build.strategy import StrategyChoice, StrategyMenu
from rlmodule.run.build.trainer import interrupts_kept, new_trainer, quieten
from rlmodule.run.build.warm_start import WarmStart
from rlmodule.run.build.written import flat, write_down
from rlmodule.run.launchers.local import launched_from_outside
from rlmodule.run.preflight.checks import check
from rlmodule.run.preflight.layout import check_layout
from rlmodule.run.preflight.teacher import check_teacher
from rlmodule.run.preflight.value_model import check_value_model
from rlmodule.run.run_plan import ModelFacts, RunPlan
from rlmodule.run.settings import Settings
from rlmodule.run.supplies import SUPPLIES, Supply

AUTO_BACKEND = "auto"


@dataclass
class Session:
    """One run.

    Args:
        settings: checked configuration.
        run_dir: where it writes.
        menu: strategies to choose from.
        strategy_node: the strategy section as configured; its keys belong to the chosen strategy.
        is_first: whether this process writes files and talks.
    """

    settings: Settings
    run_dir: RunDirectory
    menu: StrategyMenu
    strategy_node: Mapping[str, Any] = field(default_factory=dict)
    is_first: bool = True

    @classmethod
    def read(cls, config: DictConfig, run_dir: RunDirectory, menu: StrategyMenu) -> Session:
        """Convert the configuration.

        Raises:
            ConfigError: the first thing that is wrong, with its full key.
        """
        settings = Settings.read(config)
        if settings.backend == AUTO_BACKEND:
            settings = replace(settings, backend="single" if Machine(settings.trainer).world_size == 1 else "ddp")
        return cls(settings, run_dir, menu, config.strategy)

    @property
    def machine(self) -> Machine:
        """What it runs on."""
        return Machine(self.settings.trainer)

    @property
    def strategy(self) -> StrategyChoice:
        """How its models are spread."""
        return StrategyChoice(self.settings, self.machine, self.menu, self.strategy_node)

    def join_peers(self) -> None:
        """Under torchrun or srun: meet the other ranks, and learn the run directory from the first."""
        self.run_dir, self.is_first = join_peers(self.machine, self.run_dir)

    # ---- before anything is loaded

    @cached_property
    def hf_config(self) -> PreTrainedConfig:
        """The model's own description."""
        return load_model_config(self.settings.model)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return load_tokenizer(self.settings.model)

    @cached_property
    def supply(self) -> Supply:
        """What the run learns from."""
        return SUPPLIES[self.settings.supply](self.settings, self.tokenizer, self.hf_config)

    def check(self) -> None:
        """Everything that can be said without weights.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        self.check_strategy()
        settings, layout = self.settings, self.strategy.layout
        check(settings, self.hf_config, layout)
        if settings.model.value == SEPARATE:
            check_value_model(settings, self.hf_config, load_model_config(critic_model(settings), "critic"), layout)
        check_teacher(settings, self.hf_config, self.tokenizer)
        if settings.model.compile:
            check_compiler(self.machine.device)
        if settings.model.activation_offload:
            check_offload(self.machine.device)
        self.supply.check(layout)
        _ = self.supply.val_prompts  # reading them checks them
        self.resume_from(say=lambda line: print(line) if self.is_first else None)

    def check_strategy(self) -> None:
        """Refuse a strategy that this machine or this model cannot have.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        strategy, mode = self.strategy.new(), self.settings.model.activation_checkpointing
        if mode == SELECTIVE and strategy.works_inside_blocks:
            raise ConfigError(
                key="model.activation_checkpointing",
                got=mode,
                because=f"strategy={self.settings.backend} gathers weights inside blocks, which cannot be told apart "
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
        wanted = self.settings.run.resume
        if not wanted:
            return None
        if Path(wanted).parent.name == "checkpoints":
            verify(Path(wanted))
            return Path(wanted).absolute()
        found, passed_over = newest_whole(self.run_dir.checkpoints)
        for line in passed_over:
            say(f"resume: {line}")
        return found

    def write_down(self, config: str, provenance: str) -> None:
        """Save what is run; the first rank's job."""
        if self.is_first:
            write_down(self.run_dir, config, provenance, is_resumed=bool(self.settings.run.resume))

    # ---- starting weights

    @property
    def _warm_start(self) -> WarmStart:
        return WarmStart(self.settings, self.run_dir)

    def warm_start(self, alone: Callable[[Path], None]) -> None:
        """Make the starting weights of a random model, once per run directory.

        Args:
            alone: makes them in a process of its own, where this one has peers.
        """
        if not self.settings.needs_warm_start or self._warm_start.is_there:
            return
        if not launched_from_outside():
            self.fit_warm_start()
            return
        if self.is_first:
            alone(self.run_dir.root)
        dist.barrier()

    def fit_warm_start(self) -> None:
        """Imitate demonstrations with the random model, on one process whatever the layout of the run."""
        inner = self._warm_start.run_dir
        inner.root.mkdir(parents=True, exist_ok=True)
        steps = self.settings.warm_start.steps
        print(f"warm start: {steps} steps of imitation, so that there is something to reinforce")
        Session(self.settings.for_warm_start(), inner, self.menu).fit()
        self._warm_start.stamp()

    # ---- the run

    def fit(self) -> None:
        """Build the parts and train; every rank of the run calls it."""
        settings = self.settings
        if settings.needs_warm_start:
            started = settings.starting_from(str(self._warm_start.run_dir.policy))
            Session(started, self.run_dir, self.menu, self.strategy_node, self.is_first).fit()
            return
        quieten()
        torch.set_num_threads(
            settings.trainer.num_threads or max(1, min(2, os.cpu_count() or 1) // self.machine.num_processes)
        )
        checkpoint = self.resume_from()
        step = None if checkpoint is None else int(read_manifest(checkpoint).facts["step"])
        objective = Objective(settings.loss, settings.algorithm)
        module, strategy = new_module(settings, objective, self.supply.samples_per_row), self.strategy.new()
        context = self._context(module.models[settings.leading_model], step)
        callbacks = [made.connect(context) for made in settings.callbacks.values()]
        datamodule = new_datamodule(settings, self.supply, objective, strategy, context.journal.begin_iteration)
        trainer = new_trainer(
            settings, self.machine, self.run_dir, strategy, callbacks, resumed_step=step, hparams=context.hparams
        )
        with interrupts_kept():
            trainer.fit(
                module,
                datamodule=datamodule,
                ckpt_path=None if checkpoint is None else checkpoint / STATE_FILE,
                weights_only=True,
            )
        if context.is_first and "report" not in settings.callbacks:
            print(f"run finished {self.run_dir.root}")

    def result(self) -> float | None:
        """Accuracy on held-out prompts, or else pairs, at the end, for sweeps; None where none was measured."""
        if not self.run_dir.summary.exists():
            return None
        summary = json.loads(self.run_dir.summary.read_text())
        values = (summary.get(name) for name in ("val_accuracy_end", "val_pair_accuracy_end"))
        return next((float(value) for value in values if value is not None), None)

    def _context(self, leading: nn.Module, resumed_step: int | None) -> RunContext:
        s = self.settings
        is_first = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")))) == 0
        return RunContext(
            run_dir=self.run_dir.root,
            is_first=is_first,
            max_iterations=s.trainer.max_epochs,
            describe=self._plan(leading).lines(),
            hparams=flat(
                {
                    "optimizer": asdict(s.optimizer),
                    "algorithm": asdict(s.algorithm),
                    "batching": asdict(s.batching),
                    "rollout": asdict(s.rollout),
                    "seed": s.run.seed,
                }
            ),
            resumed_step=resumed_step,
            tokenizer=self.tokenizer,
            sampling={name: getattr(s.rollout, name) for name in ("temperature", "top_k", "top_p")},
        )

    def _plan(self, leading: nn.Module) -> RunPlan:
        model, supply = self.settings.model, self.supply
        name = model.path or str(model.architecture.get("model_type"))
        return RunPlan(
            self.settings,
            self.strategy.layout,
            ModelFacts(name, parameter_count(leading), str(leading.loading)),
            self.machine.describe(),
            supply.describe(),
            supply.describe_iteration(),
            supply.describe_held_out(),
            supply.samples_per_row,
        )
