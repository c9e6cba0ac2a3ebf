"""The LightningModule: hooks only, each a few calls.

Leaves out the optimizer step itself, which needs no Lightning (``training/update.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlmodule.core.contract import Strategy
from rlmodule.core.errors import TrainingError
from rlmodule.core.metrics import Metric, ReduceType
from rlmodule.core.preemption import PreemptionHandler
from rlmodule.core.types import MiniBatch
from rlmodule.optim.parts.decay import decayed_parameters
from rlmodule.optim.parts.hidden import hidden_matrices
from rlmodule.optim.parts.schedule import build_schedule
from rlmodule.training.reduction import reduce_metrics
from rlmodule.training.update import StepResult, Trainable, update

if TYPE_CHECKING:  # types alone
    from rlmodule.batching.row_limit import RowLimit

STOP = "train/stop"  # reduced with the metrics of a step, and never logged


@dataclass
class Counters:
    """Progress of a run, saved with its checkpoints.

    Args:
        steps: mini-batches seen; the x axis of every curve.
        optimizer_steps: optimizer steps taken.
        skipped: steps skipped because the gradient norm was not finite.
        skipped_in_a_row: steps skipped since the last one that was taken.
        empty: mini-batches without a loss token.
        zero_gradient: mini-batches with loss tokens and without a sample that can have a gradient.
    """

    steps: int = 0
    optimizer_steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    empty: int = 0
    zero_gradient: int = 0

    def count(self, result: StepResult) -> None:
        """Add one mini-batch."""
        self.steps += 1
        self.optimizer_steps += result.stepped
        self.empty += result.empty
        self.zero_gradient += result.zero_gradient
        is_nothing = result.empty or result.zero_gradient
        failed = not result.stepped and not is_nothing
        self.skipped += failed
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if failed else self.skipped_in_a_row * is_nothing


@dataclass(frozen=True)
class StepReport:
    """What is logged of one mini-batch: merged over ranks, the same on every rank.

    Args:
        step: mini-batches seen, this one included.
        metrics: name -> value.
    """

    step: int
    metrics: Mapping[str, float]


class RLModule(L.LightningModule):
    """Trains models on mini-batches, each with its own optimizer.

    Args:
        models: name -> inner model; models that do not train are frozen.
        trainables: the models that train, in the order of ``models``.
        max_skipped_in_a_row: skipped steps after which the run fails.
        row_limit: cuts rows that do not fit in memory; None lets them fail.

    Attributes:
        counters: progress of the run.
        preemption: signals that ask the run to stop.
        must_stop: whether any rank had received such a signal when the last step ended; the same on every rank.
        last_step: report of the last mini-batch, None before the first.
        after_step: called with what became of each mini-batch.
        after_last_save: called when training has ended and every callback is done; the last state is saved by then.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        trainables: Sequence[Trainable],
        *,
        max_skipped_in_a_row: int,
        row_limit: RowLimit | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.models = nn.ModuleDict(models)
        self.trainables = tuple(trainables)
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self.row_limit = row_limit
        self.decayed = {name: decayed_parameters(model) for name, model in models.items()}
        self.hidden = {name: hidden_matrices(model) for name, model in models.items()}
        self.counters = Counters()
        self.preemption = PreemptionHandler()
        self.must_stop = False
        self.last_step: StepReport | None = None
        self.after_step: Callable[[StepResult], None] = lambda result: None
        self.after_last_save: Callable[[], None] = lambda: None

    @property
    def strategy(self) -> Strategy:
        """The trainer's strategy, as the project's own interface."""
        return self.trainer.strategy  # type: ignore[return-value]

    def inner_models(self) -> dict[str, nn.Module]:
        """The models that the strategy wraps, each by itself."""
        return dict(self.models.items())

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LRScheduler]]:
        optimizers: list[Optimizer] = [
            t.optimizer.build(self.strategy.named_parameters(t.name), self.decayed[t.name], self.hidden[t.name])
            for t in self.trainables
        ]
        schedules: list[LRScheduler] = [
            build_schedule(t.optimizer, optimizer, t.run_steps)
            for t, optimizer in zip(self.trainables, optimizers, strict=True)
        ]
        return optimizers, schedules

    def training_step(self, mini_batch: MiniBatch, batch_idx: int) -> None:
        """Take an optimizer step of every model that trains on this mini-batch, and report it."""
        with_optimizers = zip(self.trainables, as_list(self.optimizers()), as_list(self.lr_schedulers()), strict=True)
        result = StepResult.of_all(
            [
                update(
                    mini_batch,
                    trainable,
                    strategy=self.strategy,
                    optimizer=optimizer,
                    schedule=schedule,
                    backward=self.manual_backward,
                    row_limit=self.row_limit,
                )
                for trainable, optimizer, schedule in with_optimizers
                if trainable.name in mini_batch.trained_models
            ]
        )
        self.counters.count(result)
        self.after_step(result)
        stop = Metric(float(self.preemption.signal_received is not None), 1.0, ReduceType.MAX)
        merged = reduce_metrics({**result.metrics, STOP: stop}, self.strategy.layout, self.strategy.collectives)
        self.must_stop = merged.pop(STOP).result > 0
        self.last_step = self._report({name: m.result for name, m in merged.items() if m.saw_data}, mini_batch)
        self._warn_or_stop(result)

    def _report(self, metrics: Mapping[str, float], mini_batch: MiniBatch) -> StepReport:
        counters = self.counters
        counts = {
            "train/optimizer_steps": float(counters.optimizer_steps),
            "train/skipped_steps": float(counters.skipped),
            "train/empty_steps": float(counters.empty),
            "train/zero_gradient_steps": float(counters.zero_gradient),
            "train/loss_tokens": float(mini_batch.totals.tokens),
        }
        return StepReport(counters.steps, {**metrics, **mini_batch.metrics, **counts})

    def _warn_or_stop(self, result: StepResult) -> None:
        """Warn of the first empty mini-batch.

        Raises:
            TrainingError: too many steps in a row were skipped.
        """
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

    def on_train_end(self) -> None:
        self.after_last_save()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rlmodule_counters"] = vars(self.counters).copy()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counters = Counters(**checkpoint["rlmodule_counters"])


def as_list(one_or_many: Any) -> list[Any]:
    """A list: Lightning returns a single optimizer or schedule without a list around it."""
    return one_or_many if isinstance(one_or_many, list) else [one_or_many]
