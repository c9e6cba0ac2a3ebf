"""Linear layers read for a product of our own: with their adapters merged, and laid out once for few rows on CPUs.

Used for the head (``output_head.py``) and for blocks (``plain_blocks.py``). Leaves out how adapters are made and
exported (``lora.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def base_of(layer: Any) -> Any:
    """The layer itself, without the adapter around it."""
    return getattr(layer, "base_layer", layer)


def merged(layer: Any) -> tuple[Tensor, Tensor | None]:
    """([N, K] weight, [N] bias or None) of a linear layer, what its adapter adds included."""
    base = base_of(layer)
    weight = base.weight
    if base is not layer and not layer.disable_adapters:
        for adapter in layer.active_adapters:
            weight = weight + layer.get_delta_weight(adapter)
    return weight, getattr(base, "bias", None)


def is_linear(layer: Any) -> bool:
    """Whether it is a linear layer, or one with an adapter of two matrices and nothing else, so that they merge."""
    base = base_of(layer)
    if type(base) is not nn.Linear or base is layer:
        return base is layer and type(layer) is nn.Linear
    return not layer.lora_variant and not any(layer.lora_bias.values())


def is_plain_weight(weight: Any) -> bool:
    """Whether it is in float32 on a CPU and counts how often it is written to, so that a copy can be seen to be old."""
    is_tensor = type(weight) in (Tensor, nn.Parameter)
    return is_tensor and weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.is_inference()


def can_be_packed() -> bool:
    """Whether oneDNN is there to lay weights out, for products as they are computed now."""
    return (
        not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")) and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


@dataclass(frozen=True, eq=False)
class Product:
    """A linear layer whose weight is laid out once.

    A product of a few dozen rows spends as long on reading and laying out a large weight as on multiplying with it.

    Args:
        weight: [K, N], or as oneDNN wants it.
        bias: [N] or None.
        is_packed: whether it is oneDNN's.
    """

    weight: Tensor
    bias: Tensor | None
    is_packed: bool

    @classmethod
    def of(cls, layers: Sequence[Any], rows: int, worth_packing: int) -> Product:
        """Of linear layers that read the same input, their outputs side by side, for products with so many rows.

        ``worth_packing`` is how many numbers a weight has from which on oneDNN's own layout is the faster one.
        """
        weights, biases = zip(*map(merged, layers), strict=True)
        weight = (torch.cat(weights) if len(weights) > 1 else weights[0]).detach()
        bias = None if biases[0] is None else torch.cat(biases).detach()
        if weight.numel() >= worth_packing and can_be_packed():
            return cls(torch.ops.mkldnn._reorder_linear_weight(weight, rows), bias, is_packed=True)
        return cls(weight.t().contiguous(), bias, is_packed=False)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        if self.is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, sum_: Tensor, x: Tensor) -> Tensor:
        """Add the product of [T, K] to [T, N], in place."""
        if self.is_packed or self.bias is not None:
            return sum_.add_(self(x))
        return sum_.addmm_(x, self.weight)
