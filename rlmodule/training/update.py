"""One optimizer step of a model on a mini-batch: forward, loss, backward, clip, step or skip.

Leaves out Lightning (``module.py``), what is minimised (``algorithm/objective.py``, ``algorithm/critic.py``), and in
which order micro-batches run and how gradients are reduced (the strategy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlmodule.core.contract import Backward, ModelObjective, Strategy
from rlmodule.core.metrics import Metric, ReduceType, merge
from rlmodule.core.types import MiniBatch
from rlmodule.training.selection import with_selection

if TYPE_CHECKING:  # types alone
    from rlmodule.batching.row_limit import RowLimit
    from rlmodule.optim.parts.config import OptimizerConfig


@dataclass(frozen=True)
class Trainable:
    """A model that trains.

    Args:
        name: of the model.
        objective: what it minimises.
        optimizer: settings of its optimizer and schedule.
        run_steps: its optimizer steps in the whole run, for the schedule.
    """

    name: str
    objective: ModelObjective
    optimizer: OptimizerConfig
    run_steps: int


@dataclass(frozen=True)
class StepResult:
    """Result of one mini-batch.

    Args:
        metrics: this rank's part of them, to be merged over ranks.
        grad_norm: global norm before clipping; NaN for an empty mini-batch.
        stepped: whether parameters were updated.
        empty: whether the whole mini-batch, over all ranks, had no loss token.
        zero_gradient: whether it had loss tokens, and no sample that can have a gradient.
    """

    metrics: dict[str, Metric]
    grad_norm: float
    stepped: bool
    empty: bool = False
    zero_gradient: bool = False

    @classmethod
    def of_all(cls, results: Sequence[StepResult]) -> StepResult:
        """The results of every model that trained on a mini-batch, as one.

        If a model took no step, ``grad_norm``, ``stepped`` and ``empty`` are those of the first such model.
        """
        worst = next((r for r in results if not r.stepped), results[0])
        return cls(merge(r.metrics for r in results), worst.grad_norm, worst.stepped, worst.empty, worst.zero_gradient)


def update(
    mini_batch: MiniBatch,
    trainable: Trainable,
    *,
    strategy: Strategy,
    optimizer: Optimizer,
    schedule: LRScheduler,
    backward: Backward,
    row_limit: RowLimit | None = None,
) -> StepResult:
    """Train one model on one mini-batch.

    ``row_limit`` cuts rows that do not fit in memory; None lets them fail. A mini-batch without loss tokens, which
    every rank sees in its totals, is not run. The schedule advances with every optimizer step taken, not with
    micro-batches or skipped steps.
    """
    name, objective = trainable.name, trainable.objective
    if mini_batch.totals.tokens == 0:
        return StepResult({}, math.nan, stepped=False, empty=True)
    if not mini_batch.has_gradient:  # moments alone would move the weights
        return StepResult({}, math.nan, stepped=False, zero_gradient=True)
    if objective.selects is not None:
        mini_batch = with_selection(mini_batch, objective.selects, name, strategy, row_limit)
    with strategy.train_mode(name):
        if row_limit is None:
            parts = strategy.forward_backward(name, mini_batch.micro_batches, objective, mini_batch.totals, backward)
        else:
            parts = row_limit.forward_backward(strategy, name, mini_batch, objective, backward)
        lr = float(optimizer.param_groups[0]["lr"])
        grad_norm = strategy.clip_and_step(optimizer, trainable.optimizer.max_grad_norm)
    stepped = math.isfinite(grad_norm)
    if stepped:
        schedule.step()
    metrics = merge(parts)
    metrics[f"{objective.label}/grad_norm"] = Metric(grad_norm, 1.0, ReduceType.MAX)
    metrics[f"{objective.label}/lr"] = Metric(lr, 1.0, ReduceType.MAX)
    return StepResult(metrics, grad_norm, stepped)
