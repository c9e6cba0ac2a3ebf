"""AdamW and its learning-rate schedule, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) with warm-up, a schedule and clipping by global norm."""

    lr: float = 2e-4  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the two moments per step
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0  # decoupled; matrices only, norms and biases are left alone
    warmup_steps: int = 5  # optimizer steps from 0 to lr
    schedule: str = "constant"  # after warm-up: constant, linear or cosine
    min_lr_ratio: float = 0.0  # the schedule ends at this share of lr
    total_steps: int | None = None  # steps the schedule spans; None: the whole run
    max_grad_norm: float = 1.0  # clip the global gradient norm to it; 0: no clipping

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        for name in ("lr", "weight_decay", "warmup_steps", "min_lr_ratio", "max_grad_norm"):
            at_least(name, getattr(self, name), 0)
        more_than("eps", self.eps, 0)
        if self.total_steps is not None:
            at_least("total_steps", self.total_steps, 1)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                key="betas",
                got=self.betas,
                because="two numbers are needed, at least 0 and below 1",
                fix="Use [0.9,0.95]",
            )


def matrices_of(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay is for; asked before sharding, which may flatten them."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.ndim >= 2)


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """``optimizer_over`` all of a model that is in one piece."""
    return optimizer_over(config, model.named_parameters(), matrices_of(model))


def optimizer_over(
    config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]], matrices: Collection[str]
) -> Optimizer:
    """AdamW over the parameters that train; both moments are fp32 because the weights are.

    Args:
        config: learning rate and the rest.
        parameters: (name, parameter) of a model.
        matrices: names of those that decay.
    """
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name in matrices], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trainable if name not in matrices], "weight_decay": 0.0},
    ]
    return AdamW(_not_empty(groups), lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


def _not_empty(groups: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    return [group for group in groups if group["params"]]


def build_schedule(config: OptimizerConfig, optimizer: Optimizer, run_steps: int) -> LambdaLR:
    """Schedule to be stepped once after every optimizer step that was taken.

    Args:
        config: shape of the schedule.
        optimizer: whose rate to set.
        run_steps: optimizer steps of the whole run, used where ``total_steps`` is None.
    """
    return LambdaLR(optimizer, lambda step: lr_factor(config, step, run_steps))


def lr_factor(config: OptimizerConfig, step: int, run_steps: int) -> float:
    """Share of the peak rate after ``step`` optimizer steps: step / warmup_steps first, then the schedule."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    end = config.total_steps or run_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
