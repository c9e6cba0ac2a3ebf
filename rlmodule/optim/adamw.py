"""AdamW."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from rlmodule.core.config import more_than
from rlmodule.optim import OPTIMIZERS
from rlmodule.optim.parts.config import OptimizerConfig, check_betas
from rlmodule.optim.parts.decay import groups_by_decay


@OPTIMIZERS.register
@dataclass(frozen=True)
class AdamW(OptimizerConfig):
    """Adam with decoupled weight decay (arXiv:1711.05101), in PyTorch's fused implementation."""

    betas: tuple[float, float] = (0.9, 0.95)  # decay rates of the two moments per step
    eps: float = 1e-8  # added to the root of the second moment

    def __post_init__(self) -> None:
        super().__post_init__()
        more_than("eps", self.eps, 0)
        check_betas(self.betas)

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], decayed: Collection[str], hidden: Collection[str] = ()
    ) -> Optimizer:
        """Build the optimizer; both moments have the dtype of the parameters, float32."""
        groups = groups_by_decay(parameters, decayed, self.weight_decay)
        betas = (self.betas[0], self.betas[1])
        return torch.optim.AdamW(groups, lr=self.peak_lr, betas=betas, eps=self.eps, fused=True)
