"""Learning-rate schedules, counted in optimizer steps."""

from __future__ import annotations

import math

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
    return LambdaLR(optimizer, lambda step: lr_factor(config, step, run_steps))


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
