"""Learning-rate schedules, counted in optimizer steps."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlmodule.optim.parts.config import CONSTANT, LINEAR, OptimizerConfig


def build_schedule(config: OptimizerConfig, optimizer: Optimizer, run_steps: int) -> LambdaLR:
    """Build the schedule; step it once after every optimizer step that was not skipped.

    Args:
        config: shape of the schedule.
        optimizer: its learning rates are set.
        run_steps: optimizer steps of the whole run, used if ``total_steps`` is None.
    """
    return Schedule(optimizer, lambda step: lr_factor(config, step, run_steps))


class Schedule(LambdaLR):
    """A schedule whose peak learning rate is the configured one, also when a checkpoint with another is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the saved step of the schedule, with the learning rates of this run."""
        super().load_state_dict({**state_dict, "base_lrs": self.base_lrs})
        rates = [base * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, base, rate in zip(self.optimizer.param_groups, self.base_lrs, rates, strict=True):
            group["initial_lr"], group["lr"] = base, rate
        self._last_lr = rates


def lr_factor(config: OptimizerConfig, step: int, run_steps: int) -> float:
    """Learning rate after ``step`` optimizer steps, over the peak: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == CONSTANT:
        return 1.0
    end = config.total_steps or run_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    left = 1 - progress if config.schedule == LINEAR else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
