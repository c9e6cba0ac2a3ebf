"""One optimizer step of a model over the micro-batches of a mini-batch: forward, loss, backward, clip, step or skip.

Leaves out Lightning (``module.py``), what is minimised (``algorithm/objective.py``, ``algorithm/critic.py``) and how
gradients travel (the strategy).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlmodule.core.contract import ModelObjective, Strategy
from rlmodule.core.metrics import Metric, ReduceType, merge
from rlmodule.core.types import MiniBatch
from rlmodule.optim.parts.config import OptimizerConfig
from rlmodule.training.selection import with_selection


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
    """What one mini-batch did.

    Args:
        metrics: this rank's parts, to be merged over token ranks.
        grad_norm: global norm before clipping; NaN for an empty mini-batch.
        stepped: whether parameters were updated.
        empty: whether the whole mini-batch had no loss token.
    """

    metrics: dict[str, Metric]
    grad_norm: float
    stepped: bool
    empty: bool = False

    @classmethod
    def of_all(cls, results: Sequence[StepResult]) -> StepResult:
        """Of every model that trains on the mini-batch; the norm is that of the first that took no step, if any."""
        worst = next((r for r in results if not r.stepped), results[0])
        return cls(merge(r.metrics for r in results), worst.grad_norm, worst.stepped, worst.empty)


def update(
    mini_batch: MiniBatch,
    trainable: Trainable,
    *,
    strategy: Strategy,
    optimizer: Optimizer,
    schedule: LRScheduler,
    backward: Callable[[Tensor], None],
) -> StepResult:
    """Train one model on one mini-batch.

    A mini-batch without loss tokens is not run at all: the totals say so on every rank alike. The schedule advances
    with optimizer steps that were taken, never with micro-batches or skipped steps.
    """
    name, objective, totals = trainable.name, trainable.objective, mini_batch.totals
    if totals.tokens == 0:
        return StepResult({}, math.nan, stepped=False, empty=True)
    model = strategy.wrapped(name)
    if objective.selects is not None:
        mini_batch = with_selection(mini_batch, objective.selects, strategy)
    parts: list[dict[str, Metric]] = []
    with strategy.train_mode(name):
        for index, micro_batch in enumerate(mini_batch.micro_batches):
            with strategy.micro_batch(name, is_last=index == len(mini_batch.micro_batches) - 1):
                share = objective.for_micro_batch(micro_batch, totals, strategy.sequence)
                backward(model(micro_batch, objective=share))
            parts.append(share.metrics)
        lr = float(optimizer.param_groups[0]["lr"])
        grad_norm = strategy.clip_and_step(optimizer, trainable.optimizer.max_grad_norm)
    stepped = math.isfinite(grad_norm)
    if stepped:
        schedule.step()
    metrics = merge(parts)
    metrics[f"{objective.label}/grad_norm"] = Metric(grad_norm, 1.0, ReduceType.MAX)
    metrics[f"{objective.label}/lr"] = Metric(lr, 1.0, ReduceType.MAX)
    return StepResult(metrics, grad_norm, stepped)
