"""One optimizer step in two ways: orthogonalised momentum for matrices, AdamW for everything else.

A matrix moves by the momentum of its gradient with all singular values brought near 1. That needs the whole matrix:
where each process holds a shard of it (DTensor), the momentum is gathered, one matrix at a time, and every process
works out the same update and takes its shard. In bfloat16 the numbers are those of ``torch.optim.Muon``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

# Keller Jordan's quintic, https://kellerjordan.github.io/posts/muon/: singular values end between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7  # of a matrix that is divided by its norm


class OrthogonalisedAdamW(Optimizer):
    """Muon for the groups of ``matrices``, AdamW for those of ``others``; a schedule sees all of them.

    Args:
        matrices: groups with ``lr``, ``weight_decay``, ``momentum``, ``nesterov``, ``scaling`` (of ``SCALINGS``) and
            ``dtype`` (of the iterations); may be empty.
        others: groups of AdamW; may be empty.
        adamw: settings of AdamW for ``others``.
    """

    def __init__(self, matrices: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], **adamw: Any) -> None:
        self.adamw = torch.optim.AdamW(list(others), **adamw) if others else None
        groups = [*matrices, *(self.adamw.param_groups if self.adamw else ())]
        super().__init__(groups, {})
        self.num_matrix_groups = len(matrices)
        if self.adamw is not None:  # one state and one set of learning rates, whoever reads or writes them
            self.adamw.state = self.state
            self.adamw.param_groups = self.param_groups[self.num_matrix_groups :]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups[: self.num_matrix_groups]:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        if self.adamw is not None:
            self.adamw.step()
        return loss

    def _move(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None, "only parameters with a gradient move"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        update = as_sharded(orthogonalised(whole(direction), getattr(torch, group["dtype"])), parameter)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * SCALINGS[group["scaling"]](*parameter.shape))


# Factor of the learning rate by the rows and columns of a matrix, so that one rate does for all shapes.
SCALINGS: dict[str, Callable[[int, int], float]] = {
    # An update has the root mean square that AdamW's usually have (arXiv:2502.16982), so its rates carry over.
    "adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    # As in Keller Jordan's optimizer.
    "jordan": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """[m, n] -> [m, n] in ``dtype``: singular vectors of ``matrix``, its singular values near 1.

    With X of Frobenius norm 1, X <- a X + (b X X' + c (X X')^2) X is applied a few times. X has no more rows than
    columns, so that X X' is the smaller of the two products.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all shards of a DTensor; every process of its mesh calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_sharded(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``, of which every process has the whole, sharded as ``like``; nothing is exchanged."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.dtype), like.device_mesh, like.placements, src_data_rank=None)
