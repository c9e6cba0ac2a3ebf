"""The same few optimizer steps on fixed, uneven samples under any strategy; every number that must agree comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.row_limit import RowLimit
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.callbacks.checkpoint import CheckpointConfig, SaveCheckpoints
from rlmodule.core.types import Prompt, Sample, TrainingSample
from rlmodule.datamodule import RLDataModule
from rlmodule.experience.iteration import Experience
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.building import build_policy_on_meta
from rlmodule.models.description import ModelConfig
from rlmodule.models.policy import PolicyModel
from rlmodule.module import RLModule
from rlmodule.optim.adamw import AdamW
from rlmodule.training.update import Trainable
from strategies.registry import STRATEGIES
from tests.callbacks.builders import context_in
from tests.helpers.tiny import frozen_copy

ARCHITECTURE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ADAMW = AdamW(lr=1e-2, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5)


@dataclass(frozen=True)
class Outcome:
    """What a run did: per step its norm and its logged metrics; whole weights at the end by their names."""

    norms: list[float]
    metrics: list[Mapping[str, float]]
    weights: dict[str, np.ndarray]
    extra: Any = None


@dataclass(frozen=True)
class FixedRun:
    """A few steps.

    Args:
        backend, options: the strategy and what is set on it.
        strategy_class: stands in for the backend's own class.
        lengths: (prompt, response) tokens of each sample; the third of a triple is the number of loss tokens.
        mini_batch_size: samples of a step.
        budget: tokens of a micro-batch.
        per_micro_batch: samples of one instead, for models that run one sample per row.
        optimizer: AdamW settings.
        architecture: changes to the tiny model.
        precision: of the model.
        model: another one, in place of the tiny one with its changes and its precision.
        policy: the same, built already.
        with_reference: keep a frozen copy of the model beside it.
        prepare: called with the strategy before anything is given to it.
        seed: of the weights.
        timer: called with (trainer, module) at the end of every rank, while the strategy is alive.
        algorithm: what the objective adds to the clipped loss.
        epochs: passes, one Lightning epoch each.
        row_limit: cuts rows that do not fit.
    """

    backend: str = "single"
    options: Mapping[str, Any] = field(default_factory=dict)
    strategy_class: type | None = None
    lengths: tuple[tuple[int, int, int], ...] = tuple(
        (3 + i % 5, 2 + (7 * i) % 23, 2 + (7 * i) % 23) for i in range(18)
    )
    mini_batch_size: int = 6
    budget: int = 40
    per_micro_batch: int | None = None
    optimizer: AdamW = ADAMW
    architecture: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "32-true"
    model: ModelConfig | None = None
    policy: PolicyModel | None = None
    with_reference: bool = False
    prepare: Callable[[Any], None] | None = None
    seed: int = 0
    timer: Callable[[L.Trainer, RLModule], Any] | None = None
    callbacks: tuple[L.Callback, ...] = ()
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    epochs: int = 1
    row_limit: RowLimit | None = None
    poison: int | None = None  # step whose advantages are not finite

    def with_options(self, backend: str, **options: Any) -> FixedRun:
        """The same run under another strategy."""
        return replace(self, backend=backend, options=options)

    def samples(self) -> list[Sample]:
        """Made-up tokens, the same everywhere."""
        draw = torch.Generator().manual_seed(7)
        made = []
        for i, (prompt, response, loss) in enumerate(self.lengths):
            ids = torch.randint(2, 90, (prompt + response,), generator=draw)
            mask = torch.arange(response) < loss
            made.append(
                Sample(
                    sample_id=i,
                    group_id=i // 2,
                    prompt=Prompt(row=i, ids=tuple(ids[:prompt].tolist()), text="", source="made"),
                    response_ids=ids[prompt:],
                    loss_mask=mask,
                    finish_reason="stop",
                )
            )
        return made

    def rows(self) -> dict[int, TrainingSample]:
        """Samples with scores that depend on nothing but their place."""
        draw = torch.Generator().manual_seed(11)
        rows = {}
        for i, sample in enumerate(self.samples()):
            size = len(sample.response_ids)
            old = -4.5 - 0.2 * torch.rand(size, generator=draw)
            advantage = torch.randn((), generator=draw).expand(size).clone()
            if self.poison is not None and i // self.mini_batch_size == self.poison:
                advantage = advantage * float("nan")
            rows[i] = TrainingSample(sample, advantage=advantage, old_logprob=old)
        return rows

    def fit(self, world_size: int = 1, rank: int = 0, ckpt: Any = None) -> Outcome:
        """Train on this process."""
        cls: Any = self.strategy_class or STRATEGIES.lookup("language_model", self.backend, device="cpu")
        strategy = cls(cls.config_class(**self.options), device="cpu", num_processes=world_size, num_nodes=1)
        config = self.model or ModelConfig(
            architecture={**ARCHITECTURE, **self.architecture}, tokenizer="byte", precision=self.precision
        )
        policy = self.policy or build_policy_on_meta(config, seed=self.seed, temperature=1.0)
        if self.prepare is not None:
            self.prepare(strategy)
        run_steps = -(-len(self.lengths) // self.mini_batch_size) * self.epochs
        module = RLModule(
            {"policy": policy, **({"reference": frozen_copy(policy)} if self.with_reference else {})},
            [Trainable("policy", Objective(PPOClip(), self.algorithm), self.optimizer, run_steps)],
            max_skipped_in_a_row=3,
            row_limit=self.row_limit,
        )
        record = Record()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            max_epochs=self.epochs,
            logger=False,
            callbacks=[record, *self.callbacks],
            use_distributed_sampler=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in self.callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            reload_dataloaders_every_n_epochs=1,
        )
        trainer.fit(module, datamodule=FixedData(self, strategy), ckpt_path=ckpt, weights_only=True)
        weights = {name: tensor.float().numpy().copy() for name, tensor in strategy.full_weights("policy")}
        extra = None if self.timer is None else self.timer(trainer, module)
        return Outcome(record.norms, record.metrics, weights, extra)


def saving(root: Path, run: FixedRun, **config: Any) -> FixedRun:
    """The run, with a checkpoint below ``root`` after each epoch."""
    save = SaveCheckpoints(CheckpointConfig(keep=9, **config), context_in(root, iterations=run.epochs))
    return replace(run, callbacks=(save,))


class Record(L.Callback):
    """Keeps what a step logged."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.metrics: list[Mapping[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.metrics.append(dict(module.last_step.metrics))
        self.norms.append(module.last_step.metrics["actor/grad_norm"])


class FixedData(RLDataModule):
    """One iteration of fixed rows per epoch."""

    def __init__(self, run: FixedRun, strategy: Any) -> None:
        super().__init__(None, None, None)  # the source is in the run
        self.run, self.strategy = run, strategy

    def train_dataloader(self) -> DataLoader:
        run = self.run
        batching = BatchingConfig(
            mini_batch_size=run.mini_batch_size,
            use_dynamic_bsz=run.per_micro_batch is None,
            max_token_len_per_gpu=run.budget,
            micro_batch_size_per_gpu=run.per_micro_batch,
            shuffle=False,
        )
        sampler = BalancedSampler(
            [s.meta for s in run.samples()], batching, self.strategy.layout, seed=0, iteration=self.next_iteration
        )
        self.next_iteration += 1
        layout = self.strategy.layout
        return DataLoader(
            Experience(run.rows(), 0, len(run.lengths)),
            batch_sampler=sampler,
            collate_fn=DynamicCollator(0, layout.sp_size, layout.sp_rank, cp_size=layout.cp_size),
        )

    def state_dict(self) -> dict[str, int]:
        return {"next_iteration": self.next_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.next_iteration = state["next_iteration"]


def check_equal(reference: Outcome, outcomes: list[Outcome]) -> None:
    """The same norms on every rank; norms, metrics and weights are those of the reference."""
    for outcome in outcomes:
        assert outcome.norms == outcomes[0].norms, "the norm is one number, on every rank"
        assert outcome.norms == pytest.approx(reference.norms, rel=1e-5)
        for mine, wanted in zip(outcome.metrics, reference.metrics, strict=True):
            for key in (
                "actor/loss",
                "actor/pg_loss",
                "actor/entropy",
                "actor/clip_frac",
                "train/loss_tokens",
                "actor/lr",
            ):
                assert mine[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-7), key
        assert relative_difference(reference, outcome) < 1e-5


def relative_difference(reference: Outcome, other: Outcome) -> float:
    """Largest difference of a whole tensor, relative to its norm."""
    assert reference.weights.keys() == other.weights.keys()
    return max(
        float(np.linalg.norm(tensor - other.weights[name]) / np.linalg.norm(tensor))
        for name, tensor in reference.weights.items()
    )
