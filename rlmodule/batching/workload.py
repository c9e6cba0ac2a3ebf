"""What a sample costs to train: FLOPs of forward and backward, from the model's own shape.

Counts useful work only: no padding, no recomputation, the language-model head at loss positions alone. The same numbers
balance the plan and give the numerator of model FLOPs utilisation. Leaves out everything below a matrix product (norms,
softmax, activations, the MoE router), which is under one percent at common sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Numbers = Sequence[int] | Sequence[float] | NDArray[Any] | Tensor

# A multiplication and an addition; and backward has two matrix products for each one of forward.
FLOPS_PER_WEIGHT = 2 * 3

# A layer of width h costs about 24 h^2 L + 4 h L^2, up to a common factor; divided by 4 h that is 6 h L + L^2, and
# 6 * 4096 = 24576 for a 7B model.
DEFAULT_LINEAR_COST = 24576.0


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer that decide its FLOPs.

    Args:
        hidden_size: width of the residual stream.
        num_layers: transformer blocks.
        num_heads, num_kv_heads: query heads and key/value heads of a block.
        head_dim: width of a head.
        intermediate_size: width of one gated MLP (of one expert where there are experts).
        vocab_size: rows of the language-model head.
        num_experts_per_token: MLPs a token passes through, shared experts included; 1 for a dense model.
        sliding_window: tokens a windowed layer looks back over, itself included; None without windowed layers.
        num_windowed_layers: how many of the layers are windowed.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_experts_per_token: int = 1
    sliding_window: int | None = None
    num_windowed_layers: int = 0

    def __post_init__(self) -> None:
        optional = {"sliding_window", "num_windowed_layers"}
        for name in (f.name for f in fields(self) if f.name not in optional):
            assert getattr(self, name) >= 1, f"{name} must be positive, got {getattr(self, name)}"
        assert 0 <= self.num_windowed_layers <= self.num_layers, f"{self} has more windowed layers than layers"
        assert self.num_windowed_layers == 0 or (self.sliding_window or 0) >= 1, (
            f"{self} has windowed layers, no window"
        )

    @property
    def weights_per_token(self) -> int:
        """Weights every token is multiplied with in the blocks: projections (grouped-query) and active gated MLPs."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size * self.num_experts_per_token
        return self.num_layers * (attention + mlp)

    def flops(self, lengths: Numbers, response_lengths: Numbers) -> Floats:
        """FLOPs of forward and backward of each sample.

        Args:
            lengths: [B] tokens, prompt and response.
            response_lengths: [B] tokens that reach the language-model head (those with a loss).

        Returns:
            [B] float64: a L + b L^2 + head; a windowed layer is linear in L past its window.
        """
        length = as_floats(lengths)  # [B]
        body = float(self.weights_per_token) * length
        head = float(self.hidden_size * self.vocab_size) * as_floats(response_lengths)
        windowed = self.num_windowed_layers
        seen = (self.num_layers - windowed) * _attended_pairs(length, None)
        if windowed:
            seen = seen + windowed * _attended_pairs(length, self.sliding_window)
        # Scores and weighted values: two products of head_dim per head and attended pair.
        attention = 2.0 * self.num_heads * self.head_dim * seen
        return FLOPS_PER_WEIGHT * (body + head + attention)


@dataclass(frozen=True)
class Workload:
    """Cost of a sample and of a micro-step, in FLOPs (arbitrary but common units without a model shape).

    Args:
        model: shape of the model that is trained; None takes 24576 L + L^2, a 7B model with hidden size 4096.
        step_cost: fixed cost of a micro-step (kernel launches, parameter gathers), in the unit of the samples; 0 counts
            matrix products alone.
    """

    model: ModelShape | None = None
    step_cost: float = 0.0

    def __post_init__(self) -> None:
        assert self.step_cost >= 0, f"step_cost must not be negative, got {self.step_cost}"

    def cost(self, lengths: Numbers, response_lengths: Numbers) -> Floats:
        """[B] tokens, [B] tokens with a loss -> [B] float64 cost of each sample."""
        if self.model is not None:
            return self.model.flops(lengths, response_lengths)
        length = as_floats(lengths)
        return DEFAULT_LINEAR_COST * length + length * length


def as_floats(numbers: Numbers) -> Floats:
    """[B] of any kind (list, array, tensor on any device) -> [B] float64 array, which squares 1e8 tokens unharmed."""
    values = numbers.detach().cpu().numpy() if isinstance(numbers, Tensor) else numbers
    return np.asarray(values, dtype=np.float64)


def _attended_pairs(length: Floats, window: int | None) -> Floats:
    """Query-key pairs under a causal mask: token t sees min(t, window) tokens."""
    full = length if window is None else np.minimum(length, float(window))
    return full * (full + 1.0) / 2.0 + (length - full) * full
