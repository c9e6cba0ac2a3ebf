"""One evaluation of a policy or a reward model: models and evaluators without training rows and optimizers.

It goes through Lightning's fit, which every strategy is set up by, and ends before the first step. Leaves out where the
weights come from (``commands/parts/policy_source.py``) and what is shown of the numbers (``commands/evaluate.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rlmodule.algorithm.config import PREFERENCES
from rlmodule.callbacks.metrics import MetricsConfig
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.callbacks.validation import ValidationConfig
from rlmodule.core.contract import Strategy
from rlmodule.core.errors import ConfigError
from rlmodule.data.stream import PromptStream
from rlmodule.datamodule import RLDataModule
from rlmodule.experience.sources import OfflineSource, RowSampler
from rlmodule.loggers import LoggedRun
from rlmodule.models.description import NO_VALUE, ModelConfig
from rlmodule.module import RLModule
from rlmodule.records.metrics_log import Record
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.build.data import build_evaluators, build_maker
from rlmodule.run.build.distributed import meet
from rlmodule.run.build.engine import build_engine
from rlmodule.run.build.models import model_specs
from rlmodule.run.build.trainer import build_trainer, reraise_keyboard_interrupt, silence_warnings
from rlmodule.run.config import RunConfig
from rlmodule.run.datasets import Prompts, TrainingDataset
from rlmodule.run.offline_datasets import Demonstrations, Preferences
from rlmodule.run.preflight.family import check_families, with_micro_batches_for
from rlmodule.run.preflight.responses import check_reward, check_reward_server
from rlmodule.run.run import Run


class NoRows(RLDataModule):
    """The data module of an evaluation: evaluators, and one batch that is never asked for."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(1)))


class StopAtStart(L.Callback):
    """Reads the weights of a checkpoint once the models are set up, and ends the fit before its first step.

    Args:
        name: of the model that is evaluated.
        checkpoint: folder to read; None where the models have their weights.
        trained: names of the parameters that the checkpoint must have.
    """

    def __init__(self, name: str, checkpoint: Path | None, trained: frozenset[str]) -> None:
        self.name = name
        self.checkpoint = checkpoint
        self.trained = trained

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.checkpoint is not None:
            RunState.of(trainer).strategy.load_model(self.name, self.checkpoint, self.trained)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = True


@dataclass(frozen=True, eq=False)
class EvaluationRun:
    """An evaluation on this rank.

    Args:
        run: the policy's settings; its ``model`` is what is loaded.
        run_dir: where numbers and answers are written.
        checkpoint: whose weights are read into the model; None for the model's own.
        began_as: what the policy is compared with, where ``model`` is not what its training began with.
    """

    run: Run
    run_dir: RunDirectory
    checkpoint: Path | None = None
    began_as: ModelConfig | None = None

    @property
    def config(self) -> RunConfig:
        """The settings of the run, less what only training has."""
        config = self.run.config
        validation = config.callbacks.get("validation", ValidationConfig())
        return replace(
            config,
            model=replace(config.model, value=NO_VALUE),
            algorithm=replace(config.algorithm, use_kl_loss=False, use_kl_in_reward=False, teacher=None),
            trainer=replace(config.trainer, max_epochs=1),
            callbacks={
                "metrics": MetricsConfig(histograms=False),
                "validation": replace(validation, every_n_iterations=0, at_start=True, at_end=False),
            },
        )

    @property
    def dataset(self) -> TrainingDataset:
        """Held-out rows: pairs for a run that learns from pairs, demonstrations for one that imitates, else prompts."""
        config = self.config
        samples = config.algorithm.is_sampled or config.reward is not None
        made = Preferences if config.algorithm.source == PREFERENCES else Prompts if samples else Demonstrations
        return made(self.config, self.run.tokenizer, self.run.hf_config)

    def check(self) -> TrainingDataset:
        """Everything that can be said without weights; returns the rows.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        config, dataset = self.config, self.dataset
        self.run.check_strategy()
        self.run.check_models()
        check_reward(config)
        check_reward_server(config)
        check_families(config, self.run.strategy.layout)
        self.run.check_weight_files()
        dataset.check_held_out(self.run.strategy.layout)
        if not (dataset.val_prompts or dataset.val_demonstrations or dataset.val_pairs):
            raise ConfigError(
                key="data.val_files",
                got=config.data.val_files,
                because="there is nothing to evaluate on",
                fix="Use data.val_files=[FILE], or environment=NAME for its held-out rows",
            )
        return dataset

    def evaluate(self) -> Record:
        """Evaluate once; every rank calls it. The record is the same on every rank but for times."""
        config = self.config
        meet(self.run.machine, config.trainer.timeout * 60)
        silence_warnings()
        torch.set_num_threads(config.trainer.num_threads or 1)
        strategy = self.run.strategy.build()
        specs = model_specs(config, config.objective, self.began_as)
        models = {name: strategy.build(name, spec) for name, spec in specs.items()}
        model = models[config.trained_model]
        trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        frozen = {name: model.requires_grad_(False).eval() for name, model in models.items()}
        module = RLModule(frozen, [], max_skipped_in_a_row=1)
        context = self._context()
        context.metrics_log.subscribe(on_phase=self.run.on_phase)
        callbacks = [made.connect(context) for made in config.callbacks.values()]
        data = self._data(self.dataset, strategy, frozen)
        callbacks.append(StopAtStart(config.trained_model, self.checkpoint, trained))
        logged = LoggedRun(self.run_dir.root, self.run_dir.root.name, (), context.hparams)
        trainer = build_trainer(config, self.run.machine, self.run_dir, strategy, callbacks, logged=logged)
        with reraise_keyboard_interrupt(), closing(data):
            trainer.fit(module, datamodule=data)
        return context.metrics_log.records[-1]

    def _data(self, dataset: TrainingDataset, strategy: Strategy, models: Mapping[str, nn.Module]) -> NoRows:
        config = with_micro_batches_for(self.config)
        ends, tokenizer = (lambda: dataset.end_tokens), dataset.tokenizer
        engine = build_engine(config.rollout, config.sampling, ends, tokenizer, strategy, models, self.run_dir.root)
        stream = PromptStream(1, config.general.seed)
        objective = config.objective
        return NoRows(
            OfflineSource([], (), RowSampler(stream, 1, lambda: strategy.layout)),
            stream,
            partial(build_maker, config, dataset, objective, strategy),
            evaluators=build_evaluators(config, dataset, objective, strategy, engine),
            engine=engine,
        )

    def _context(self) -> RunContext:
        config = self.config
        hparams: Mapping[str, object] = {f"val.{name}": value for name, value in vars(config.val).items()}
        return RunContext(
            run_dir=self.run_dir.root,
            is_rank_zero=self.run.is_rank_zero,
            max_iterations=1,
            describe={},
            hparams={"model": str(self.checkpoint or config.model.path), **hparams},
            resumed_step=None,
            tokenizer=self.run.tokenizer,
        )
