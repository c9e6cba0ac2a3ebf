"""The cost model: FLOPs of forward and backward of a sample.

It counts useful matrix products only: no padding, no recomputation, the language-model head at loss tokens alone, and
no elementwise operations (norms, softmax, activations), which are under one percent at common sizes. The same numbers
balance the plan and are the numerator of model FLOPs utilisation. ``models/shape.py`` reads a ModelShape off a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Numbers = Sequence[int] | Sequence[float] | NDArray[Any] | Tensor

# A multiply-add is two FLOPs, and backward has two matrix products for each one of forward.
FLOPS_PER_MAC = 2 * 3

# A layer of width h costs about 24 h^2 L + 4 h L^2, up to a common factor; divided by 4 h that is 6 h L + L^2, and
# 6 * 4096 = 24576 for a 7B model.
DEFAULT_LINEAR_COST = 24576.0


@dataclass(frozen=True)
class AttentionShape:
    """Softmax-attention layers of one kind.

    Args:
        num_layers: how many layers of this kind there are.
        num_heads, num_kv_heads: query heads and key/value heads of a layer.
        key_dim, value_dim: width of a query or key, and of a value.
        window: tokens a token sees, itself included; None for all before it.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_heads, self.num_kv_heads, self.key_dim, self.value_dim)
        assert min(sizes) >= 1, f"sizes must be positive, got {self}"
        assert self.window is None or self.window >= 1, f"a window includes the token itself, got {self}"

    @property
    def cached(self) -> int:
        """Numbers in the key and the value of one token in one layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def macs(self, length: Floats) -> Floats:
        """[B] tokens -> [B] multiply-adds of the forward pass: scores and weighted values of every attended pair."""
        per_pair = float(self.num_layers * self.num_heads * (self.key_dim + self.value_dim))
        return per_pair * _attended_pairs(length, self.window)


@dataclass(frozen=True)
class ModelShape:
    """What decides the FLOPs of a model.

    Args:
        macs_per_token: multiply-adds per token of the forward pass, without softmax attention and head; for a dense
            transformer the number of weights in its matrices. Linear attention is included, of experts the active ones.
        macs_per_loss_token: multiply-adds of the language-model head.
        attention: the kinds of softmax-attention layers.
    """

    macs_per_token: float
    macs_per_loss_token: float
    attention: tuple[AttentionShape, ...] = ()

    def __post_init__(self) -> None:
        assert min(self.macs_per_token, self.macs_per_loss_token) > 0, f"a model multiplies, got {self}"

    @property
    def cached_per_token(self) -> int:
        """Numbers in the keys and values of one token, all layers together."""
        return sum(kind.num_layers * kind.cached for kind in self.attention)

    def cache_bytes(self, length: int, itemsize: int) -> int:
        """Bytes that a row of ``length`` tokens needs for keys and values while responses are drawn.

        A layer's are copied when rows come in or need more room, so a row counts as if it had one layer more.
        """
        return (self.cached_per_token + max((kind.cached for kind in self.attention), default=0)) * length * itemsize

    def flops(self, lengths: Numbers, response_lengths: Numbers) -> Floats:
        """FLOPs of forward and backward of each sample.

        Args:
            lengths: [B] tokens, prompt and response.
            response_lengths: [B] tokens that reach the language-model head (those with a loss).

        Returns:
            [B] float64: a L + b L^2 + head; a windowed layer is linear in L past its window.
        """
        length = as_floats(lengths)  # [B]
        macs = self.macs_per_token * length + self.macs_per_loss_token * as_floats(response_lengths)
        for kind in self.attention:
            macs = macs + kind.macs(length)
        return FLOPS_PER_MAC * macs


@dataclass(frozen=True)
class Exchange:
    """What ranks that share a row pay for exchanging heads, on top of its work.

    The default is arithmetic and not a measurement: a 7B model with 32 query and 8 key/value heads sends about 40 KB of
    bfloat16 per token and layer, beside 1.3 GFLOP and attention, which at 400 GB/s and 400 TFLOP/s is 3 percent of
    their time. At 50 GB/s, as between nodes, it is about 25 percent.

    Args:
        overhead: share of the row's work, within a node.
        across_nodes: the same for ranks of several nodes.
        node_size: ranks of a node; 0 where all are on one.
    """

    overhead: float = 0.03
    across_nodes: float = 0.25
    node_size: int = 0

    def __post_init__(self) -> None:
        assert min(self.overhead, self.across_nodes, self.node_size) >= 0, f"nothing is negative, got {self}"

    def share(self, width: NDArray[np.int64]) -> Floats:
        """[...] ranks that share each row -> what the row costs each of them, over its work."""
        is_far = (width > self.node_size) & (self.node_size > 0)
        overhead = np.where(width > 1, np.where(is_far, self.across_nodes, self.overhead), 0.0)
        return (1.0 + overhead) / width


@dataclass(frozen=True)
class Workload:
    """Cost of a sample and of a micro-step, in FLOPs (arbitrary but common units without a model shape).

    Args:
        model: shape of the model that is trained; None takes 24576 L + L^2, a 7B model with hidden size 4096.
        step_cost: fixed cost of a micro-step (kernel launches, parameter gathers), in the unit of the samples; 0 counts
            matrix products alone.
        exchange: what ranks pay that share a row.
    """

    model: ModelShape | None = None
    step_cost: float = 0.0
    exchange: Exchange = Exchange()

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
