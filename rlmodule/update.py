"""One optimizer step over the micro-batches of one mini-batch: forward, loss, backward, clip, step or skip.

Leaves out Lightning (``module.py``), the objective (``objective.py``) and how gradients travel (the strategy).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlmodule.core.contract import Strategy
from rlmodule.core.metrics import How, Metric, merge
from rlmodule.core.types import MiniBatch
from rlmodule.objective import Objective
from rlmodule.selection import with_selection


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


def update(
    mini_batch: MiniBatch,
    *,
    strategy: Strategy,
    objective: Objective,
    optimizer: Optimizer,
    schedule: LRScheduler,
    max_grad_norm: float,
    backward: Callable[[Tensor], None],
) -> StepResult:
    """Train ``policy`` on one mini-batch.

    A mini-batch without loss tokens is not run at all: the totals say so on every rank alike. The schedule advances
    with optimizer steps that were taken, never with micro-batches or skipped steps.
    """
    totals = mini_batch.totals
    if totals.tokens == 0:
        return StepResult({}, math.nan, stepped=False, empty=True)
    policy = strategy.wrapped("policy")
    if objective.selects is not None:
        mini_batch = with_selection(mini_batch, objective.selects, strategy)
    parts: list[dict[str, Metric]] = []
    with strategy.train_mode("policy"):
        for index, micro_batch in enumerate(mini_batch.micro_batches):
            with strategy.micro_batch(is_last=index == len(mini_batch.micro_batches) - 1):
                share = objective.over(micro_batch, totals, strategy.sequence)
                backward(policy(micro_batch, objective=share))
            parts.append(share.metrics)
        lr = float(optimizer.param_groups[0]["lr"])
        grad_norm = strategy.clip_and_step(optimizer, max_grad_norm)
    stepped = math.isfinite(grad_norm)
    if stepped:
        schedule.step()
    metrics = merge(parts)
    metrics["actor/grad_norm"] = Metric(grad_norm, 1.0, How.MAX)
    metrics["actor/lr"] = Metric(lr, 1.0, How.MAX)
    return StepResult(metrics, grad_norm, stepped)
