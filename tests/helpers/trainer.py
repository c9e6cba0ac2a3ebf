"""Fit fixed rows with a real Lightning trainer, alone or on forked ranks: the module, a strategy and nothing sampled."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
from torch.utils.data import DataLoader

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import TrainingSample
from rlmodule.experience.iteration import Experience
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.module import RLModule
from rlmodule.run.build.accelerators import accelerator_of
from rlmodule.run.build.trainer import silence_warnings
from rlmodule.training.update import Trainable
from strategies.parts.mesh import current_layout
from strategies.registry import STRATEGIES
from tests.helpers.tiny import SMOOTH, tiny_policy


class FixedRows(L.LightningDataModule):
    """The same rows every epoch, shared out by the strategy's layout."""

    def __init__(self, rows: Sequence[TrainingSample], config: BatchingConfig) -> None:
        super().__init__()
        self.rows, self.config = rows, config

    def train_dataloader(self) -> DataLoader[Any]:
        layout = self.trainer.strategy.layout
        metas = [row.sample.meta for row in self.rows]
        sampler = BalancedSampler(metas, self.config, layout, seed=0, iteration=self.trainer.current_epoch)
        experience = Experience(dict(enumerate(self.rows)), 0, len(self.rows))
        return DataLoader(experience, batch_sampler=sampler, collate_fn=DynamicCollator())


class KeepReports(L.Callback):
    """What the module reports of each step, and whether its strategy left the module itself unwrapped."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert trainer.strategy.model is pl_module, "the LightningModule is never wrapped"
        self.steps.append(dict(pl_module.last_step.metrics))


@dataclass(frozen=True)
class Fit:
    """What a fit came to on one rank.

    Args:
        steps: the report of every mini-batch.
        weights, reference: by Hugging Face name, as the strategy streams them.
        counters: of the module.
        layout: data ranks and this one's number.
        failure: the words of the error that ended it, empty when it ran to its end.
        warnings: what was warned of.
    """

    steps: list[dict[str, float]]
    weights: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]
    counters: dict[str, int]
    layout: tuple[int, int]
    failure: str
    warnings: list[str]


def fit(
    rank: int,
    backend: str,
    *,
    rows: Sequence[TrainingSample],
    config: BatchingConfig,
    use_kl_loss: bool = False,
    epochs: int = 2,
    max_skipped_in_a_row: int = 3,
    device: str = "cpu",
    callbacks: Sequence[L.Callback] = (),
) -> Fit:
    """Train a tiny policy; ``rank`` is what ``run_on_ranks`` passes, 0 in a process of its own. ``device`` is its kind."""
    world_size = current_layout().world_size
    cls = STRATEGIES.lookup("language_model", backend, device=device)
    strategy = cls(cls.config_class(), device=device, num_processes=world_size, num_nodes=1)
    models = {"policy": tiny_policy()}
    if use_kl_loss:
        models["reference"] = tiny_policy(seed=1).requires_grad_(False).eval()
    models = {name: model.to(device) for name, model in models.items()}
    objective = Objective(PPOClip(), AlgorithmConfig(use_kl_loss=use_kl_loss, entropy_coeff=0.01))
    module = RLModule(
        models,
        [Trainable("policy", objective, SMOOTH, run_steps=8)],
        max_skipped_in_a_row=max_skipped_in_a_row,
    )
    reports = KeepReports()
    trainer = L.Trainer(
        accelerator=accelerator_of(device),
        devices=world_size,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[reports, *callbacks],
        logger=False,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    failure = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_warnings()
        try:
            trainer.fit(module, datamodule=FixedRows(rows, config))
        except TrainingError as error:
            failure = str(error)
        weights, reference = (
            {key: tensor.cpu().numpy().copy() for key, tensor in strategy.full_weights(name)} if name in models else {}
            for name in ("policy", "reference")
        )
    return Fit(
        steps=reports.steps,
        weights=weights,
        reference=reference,
        counters=dict(vars(module.counters)),
        layout=(strategy.layout.dp_size, strategy.layout.dp_rank),
        failure=failure,
        warnings=[str(w.message) for w in caught],
    )
