"""The LightningModule: hooks only, each a few calls.

What they do is in ``training/update.py``, which knows no Lightning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlmodule.core.contract import Strategy
from rlmodule.core.errors import TrainingError
from rlmodule.core.metrics import Metric, ReduceType
from rlmodule.core.types import MiniBatch
from rlmodule.optim.parts.decay import decayed_parameters
from rlmodule.optim.parts.schedule import build_schedule
from rlmodule.training.preemption import PreemptionHandler
from rlmodule.training.reduction import reduce_metrics
from rlmodule.training.update import StepResult, Trainable, update

STOP = "train/stop"  # travels with the metrics of a step, and is none


@dataclass
class Counters:
    """Progress that is saved with a checkpoint.

    Args:
        steps: mini-batches seen; the x axis of every curve.
        optimizer_steps: updates taken.
        skipped: updates skipped for a norm that was not finite.
        skipped_in_a_row: the same since the last update taken.
        empty: mini-batches without a loss token.
    """

    steps: int = 0
    optimizer_steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    empty: int = 0

    def count(self, result: StepResult) -> None:
        """Take note of one mini-batch."""
        self.steps += 1
        self.optimizer_steps += result.stepped
        self.empty += result.empty
        failed = not result.stepped and not result.empty
        self.skipped += failed
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if failed else self.skipped_in_a_row * result.empty


@dataclass(frozen=True)
class StepReport:
    """One mini-batch as it is logged: merged over data ranks, the same on every rank."""

    step: int
    metrics: Mapping[str, float]


class RLModule(L.LightningModule):
    """Trains models on mini-batches, each by an optimizer of its own.

    Args:
        models: name -> inner model; those that do not train are frozen.
        trainables: the models that train, in the order of ``models``.
        max_skipped_in_a_row: give up after that many skipped steps.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        trainables: Sequence[Trainable],
        *,
        max_skipped_in_a_row: int,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.models = nn.ModuleDict(models)
        self.trainables = tuple(trainables)
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self.decayed = {name: decayed_parameters(model) for name, model in models.items()}
        self.counters = Counters()
        self.preemption = PreemptionHandler()
        self.must_stop = False  # whether some rank was asked to stop, as all know since the last step
        self.last_step: StepReport | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy in use, by the project's contract."""
        return self.trainer.strategy  # type: ignore[return-value]

    def inner_models(self) -> dict[str, nn.Module]:
        """What a strategy wraps: each model by itself, never this module."""
        return dict(self.models.items())

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LRScheduler]]:
        """One optimizer for each model that trains, and its schedule."""
        optimizers: list[Optimizer] = [
            t.optimizer.build(self.strategy.named_parameters(t.name), self.decayed[t.name]) for t in self.trainables
        ]
        schedules: list[LRScheduler] = [
            build_schedule(t.optimizer, optimizer, t.run_steps)
            for t, optimizer in zip(self.trainables, optimizers, strict=True)
        ]
        return optimizers, schedules

    def training_step(self, mini_batch: MiniBatch, batch_idx: int) -> None:
        """One optimizer step of every model that trains on this mini-batch."""
        made = zip(self.trainables, as_list(self.optimizers()), as_list(self.lr_schedulers()), strict=True)
        result = StepResult.of_all(
            [
                update(
                    mini_batch,
                    trainable,
                    strategy=self.strategy,
                    optimizer=optimizer,
                    schedule=schedule,
                    backward=self.manual_backward,
                )
                for trainable, optimizer, schedule in made
                if trainable.name in mini_batch.trained_models
            ]
        )
        self.counters.count(result)
        asked = Metric(float(self.preemption.signal_received is not None), 1.0, ReduceType.MAX)
        merged = reduce_metrics({**result.metrics, STOP: asked}, self.strategy.layout, self.strategy.collectives)
        self.must_stop = merged.pop(STOP).result > 0
        self.last_step = self._report({name: m.result for name, m in merged.items() if m.saw_data}, mini_batch)
        self._warn_or_stop(result)

    def _report(self, metrics: Mapping[str, float], mini_batch: MiniBatch) -> StepReport:
        counters = self.counters
        counts = {
            "train/optimizer_steps": float(counters.optimizer_steps),
            "train/skipped_steps": float(counters.skipped),
            "train/empty_steps": float(counters.empty),
            "train/loss_tokens": float(mini_batch.totals.tokens),
        }
        return StepReport(counters.steps, {**metrics, **mini_batch.metrics, **counts})

    def _warn_or_stop(self, result: StepResult) -> None:
        """Say so when a step did nothing; give up when that goes on."""
        counters = self.counters
        if result.empty and counters.empty == 1:
            warnings.warn(
                f"step {counters.steps} has no loss token on any rank; it is skipped and counted", stacklevel=2
            )
        if counters.skipped_in_a_row and counters.skipped_in_a_row >= self.max_skipped_in_a_row:
            raise TrainingError(
                f"the gradient norm was {result.grad_norm} in {counters.skipped_in_a_row} steps in a row "
                f"(trainer.max_skipped_in_a_row={self.max_skipped_in_a_row}), last in step {counters.steps}. "
                "Lower optimizer.lr, or look for rewards and advantages that are not finite"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the counters."""
        checkpoint["rlmodule_counters"] = vars(self.counters).copy()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Bring the counters back."""
        self.counters = Counters(**checkpoint["rlmodule_counters"])


def as_list(one_or_many: Any) -> list[Any]:
    """Lightning hands out a single optimizer or schedule without a list around it."""
    return one_or_many if isinstance(one_or_many, list) else [one_or_many]
