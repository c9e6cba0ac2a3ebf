"""Decoding through blocks of the plain kind on CPUs, with weights laid out once for products with few rows.

The plain kind is RMS norm, rotary attention over all keys, RMS norm and a gated MLP, each of the two added to what came
in (Llama, Qwen2, Qwen3 and others). A product of a few dozen rows spends as long on reading and laying out a weight as
on multiplying with it, and the calls of modules between the products take as long again. So queries, keys and values
are one product, gate and up another, adapters are merged, and all else of a block is a dozen calls. This is another
copy of the weights of the blocks, kept no longer than keys and values are.

Whether a model is of this kind is measured before a run (``agreement.py``); any other is decoded by its own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rlmodule.models.linear import Product, is_linear, is_plain_weight, merged
from rlmodule.ops.attention import DecodeBlock, decode_attention, unseen_slots

TRUNK = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
WORTH_PACKING = 1 << 19  # numbers in a matrix from which on oneDNN's own layout is faster than a transposed one
CLOSE = 1e-5  # relative difference up to which a norm is an RMS norm


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm of the last dimension; ``weight`` [H]."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """The same as the module."""
        return cls(module.weight.detach(), _epsilon(module))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, eq=False)
class Block:
    """One block: its norms, products and activation."""

    before_attention: Norm
    qkv: Product
    head_norms: tuple[Norm, Norm] | None
    out: Product
    before_mlp: Norm
    gate_up: Product
    activation: nn.Module
    down: Product

    @classmethod
    def of(cls, layer: Any, rows: int) -> Block:
        """Lay out a layer for products with so many rows."""
        attention, mlp = layer.self_attn, layer.mlp
        norms = (attention.q_norm, attention.k_norm) if set(attention._modules) >= HEAD_NORMS else None
        return cls(
            before_attention=Norm.of(layer.input_layernorm),
            qkv=Product.of([attention.q_proj, attention.k_proj, attention.v_proj], rows, WORTH_PACKING),
            head_norms=None if norms is None else (Norm.of(norms[0]), Norm.of(norms[1])),
            out=Product.of([attention.o_proj], rows, WORTH_PACKING),
            before_mlp=Norm.of(layer.post_attention_layernorm),
            gate_up=Product.of([mlp.gate_proj, mlp.up_proj], rows, WORTH_PACKING),
            activation=mlp.act_fn,
            down=Product.of([mlp.down_proj], rows, WORTH_PACKING),
        )


@dataclass(frozen=True, eq=False)
class PlainBlocks:
    """The trunk of a model, laid out.

    Args:
        trunk: gives embeddings and rotary angles.
        blocks: its layers.
        norm: after the last.
        scaling: factor on query-key products.
        head_dim: of queries, keys and values.
        num_heads, num_kv_heads: of queries; of keys and values.
        made_of: every weight with the module and name that it was read from, and how often it had been written to.
    """

    trunk: Any
    blocks: tuple[Block, ...]
    norm: Norm
    scaling: float
    head_dim: int
    num_heads: int
    num_kv_heads: int
    made_of: tuple[tuple[nn.Module, str, Tensor, int], ...]

    @classmethod
    def of(cls, lm: PreTrainedModel, rows: int) -> PlainBlocks | None:
        """The trunk laid out for products with so many rows; None where it is of another kind, or not on a CPU."""
        trunk: Any = lm.base_model
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not _is_plain(trunk):
            return None
        attention = trunk.layers[0].self_attn
        size = attention.head_dim
        return cls(
            trunk=trunk,
            blocks=tuple(Block.of(layer, rows) for layer in trunk.layers),
            norm=Norm.of(trunk.norm),
            scaling=attention.scaling,
            head_dim=size,
            num_heads=attention.q_proj.out_features // size,
            num_kv_heads=attention.k_proj.out_features // size,
            made_of=tuple((module, name, p, p._version) for module, name, p in _leaves(trunk)),
        )

    def is_of(self, lm: PreTrainedModel) -> bool:
        """Whether the weights are those that were laid out, and have not been written to since."""
        return self.trunk is lm.base_model and all(
            module._parameters[name] is weight and weight._version == version
            for module, name, weight, version in self.made_of
        )

    def __call__(self, input_ids: Tensor, lengths: Tensor, blocks: list[DecodeBlock], cache: Cache) -> Tensor:
        """[B, Q] new tokens of rows with ``lengths`` [B] entries in the cache -> [B, Q, H] last hidden states."""
        batch, new = input_ids.shape
        hidden = functional.embedding(input_ids.flatten(), self.trunk.embed_tokens.weight)
        places = (lengths[:, None] + torch.arange(new)).flatten()
        cos, sin = (x[0, :, None] for x in self.trunk.rotary_emb(hidden, places[None]))  # [T, 1, D]
        half = self.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        unseen = unseen_slots(lengths + 1, blocks, new)
        for number, block in enumerate(self.blocks):
            query, key, value = self._heads(block, hidden, cos, sin)
            key, value = (x.view(batch, new, -1, self.head_dim).transpose(1, 2) for x in (key, value))
            keys, values = cache.update(key, value, number)
            query = query.view(batch, new, self.num_heads, -1).transpose(1, 2)
            attended = decode_attention(query, keys, values, blocks, unseen, self.scaling)
            block.out.add_to(hidden, attended.reshape(batch * new, -1))
            gate, up = block.gate_up(block.before_mlp(hidden)).chunk(2, -1)
            block.down.add_to(hidden, block.activation(gate).mul_(up))
        return self.norm(hidden).view(batch, new, -1)

    def _heads(self, block: Block, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] -> [T, heads, D] queries, keys (both turned to their places) and values."""
        count, kv = self.num_heads, self.num_kv_heads
        heads = block.qkv(block.before_attention(hidden)).view(len(hidden), count + 2 * kv, self.head_dim)
        turned, value = heads.split([count + kv, kv], 1)
        if block.head_norms is not None:
            of_query, of_key = block.head_norms
            turned = torch.cat([of_query(turned[:, :count]), of_key(turned[:, count:])], 1)
        turned = torch.addcmul(turned * cos, turned.roll(self.head_dim // 2, -1), sin)
        return turned[:, :count], turned[:, count:], value


def _leaves(trunk: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in trunk.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


# ---- whether a trunk is of the plain kind, as far as its modules say


def _is_plain(trunk: Any) -> bool:
    if not _has_plain_weights(trunk) or set(trunk._modules) != TRUNK or type(trunk.embed_tokens) is not nn.Embedding:
        return False
    layers = list(trunk.layers)
    return bool(layers) and all(map(_is_plain_layer, layers)) and _is_norm(trunk.norm) and _turns_whole_heads(trunk)


def _has_plain_weights(trunk: nn.Module) -> bool:
    """Whether all are float32 on a CPU and count how often they are written to, and modules have no hooks."""
    return all(map(is_plain_weight, trunk.parameters())) and not any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in trunk.modules()
    )


def _is_plain_layer(layer: Any) -> bool:
    if set(layer._modules) != LAYER or set(layer.mlp._modules) != MLP:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if set(attention._modules) not in (ATTENTION, ATTENTION | HEAD_NORMS) or _window(attention) is not None:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(getattr(attention, n, None) for n in HEAD_NORMS)]
    read = [attention.q_proj, attention.k_proj, attention.v_proj]
    of_mlp = [mlp.gate_proj, mlp.up_proj]
    return (
        all(norm is None or _is_norm(norm) for norm in norms)
        and all(map(is_linear, [*read, attention.o_proj, *of_mlp, mlp.down_proj]))
        and all(len({merged(one)[1] is None for one in parts}) == 1 for parts in (read, of_mlp))
        and not any(isinstance(value, float) for value in vars(layer).values())  # factors on what is added
    )


def _window(attention: Any) -> Any:
    config = attention.config
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[attention.layer_idx] == "full_attention":
        return None
    return getattr(attention, "sliding_window", None) or getattr(config, "sliding_window", None)


@torch.no_grad()
def _is_norm(module: Any) -> bool:
    """Whether it does what an RMS norm with its weight does."""
    weight = getattr(module, "weight", None)
    if weight is None or not _epsilon(module):
        return False
    x = torch.arange(1.0, len(weight) + 1).cos()[None]
    expected = Norm.of(module)(x)
    return bool((module(x) - expected).abs().max() <= CLOSE * expected.abs().max())


def _turns_whole_heads(trunk: Any) -> bool:
    """Whether there is one angle for every two numbers of a head."""
    weight = trunk.embed_tokens.weight
    angles = trunk.rotary_emb(weight[:1, None].detach(), torch.zeros(1, 1, dtype=torch.int64))
    return isinstance(angles, tuple) and [x.shape[-1] for x in angles] == [trunk.layers[0].self_attn.head_dim] * 2
