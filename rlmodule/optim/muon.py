"""Muon for the matrices of hidden layers, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from rlmodule.core.config import at_least, at_most, more_than, one_of
from rlmodule.core.parameters import STATE_NAMES
from rlmodule.optim import OPTIMIZERS
from rlmodule.optim.parts.config import OptimizerConfig, check_betas
from rlmodule.optim.parts.decay import groups_by_decay
from rlmodule.optim.parts.orthogonal import SCALINGS, OrthogonalisedAdamW


@OPTIMIZERS.register
@dataclass(frozen=True)
class Muon(OptimizerConfig):
    """Momentum orthogonalised by Newton-Schulz iterations (https://kellerjordan.github.io/posts/muon/).

    It trains the two-dimensional weights inside of the blocks. Embeddings, heads, norms, biases and fused experts are
    trained by AdamW in the same optimizer step. The schedule multiplies both learning rates.
    """

    needs_matrices: ClassVar[bool] = True

    adamw_lr: float | None = None  # peak learning rate of what AdamW trains; null: lr
    momentum: float = 0.95  # decay rate of the mean of gradients per step
    nesterov: bool = True  # look one step ahead along the momentum
    scaling: str = "adamw"  # factor of lr by shape: adamw (0.2 root of the longer side) or jordan
    dtype: str = "float32"  # of the iterations: float32, or bfloat16 as in torch.optim.Muon, faster on a GPU
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW: decay rates of the two moments per step
    eps: float = 1e-8  # AdamW: added to the root of the second moment

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adamw_lr is not None:
            at_least("adamw_lr", self.adamw_lr, 0)
        at_least("momentum", self.momentum, 0)
        at_most("momentum", self.momentum, 1)
        one_of("scaling", self.scaling, SCALINGS)
        one_of("dtype", self.dtype, ("float32", "bfloat16"))
        more_than("eps", self.eps, 0)
        check_betas(self.betas)

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], decayed: Collection[str], hidden: Collection[str]
    ) -> Optimizer:
        """Build the optimizer; its states have the dtype of the parameters, float32."""
        named = list(parameters)
        matrices = {
            "params": [p for name, p in named if name in hidden and p.requires_grad],
            "lr": self.peak_lr,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "scaling": self.scaling,
            "dtype": self.dtype,
            STATE_NAMES: ("momentum_buffer",),
        }
        rest = ((name, parameter) for name, parameter in named if name not in hidden)
        return OrthogonalisedAdamW(
            [matrices] if matrices["params"] else [],
            groups_by_decay(rest, decayed, self.weight_decay),
            lr=self.peak_lr if self.adamw_lr is None else self.adamw_lr,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            fused=True,
        )
