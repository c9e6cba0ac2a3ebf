"""Causal attention within the segments of a packed row, and of new tokens against a ragged KV buffer.

On CUDA in half precision this is PyTorch's variable-length kernel; elsewhere, one batched causal call per bucket of
segments. Which tokens see each other is in ``segments.py``; rotary embeddings and the exchange of heads between
sequence-parallel ranks are the caller's.

``Hq`` query heads, ``Hkv`` key/value heads (Hq a multiple of Hkv), ``D`` size of query and key heads, ``Dv`` of value
heads, ``C`` slots of a KV buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from rlmodule.core.devices import VARLEN, attention_of
from rlmodule.ops.segments import EndToEnd, SegmentBuckets, SideBySide

# [rows, Hq, Q, D], [rows, Hkv, K, D], [rows, Hkv, K, Dv] -> [rows, Hq, Q, Dv]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentBuckets,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every segment of a packed row to its prefix and itself; differentiable.

    Args:
        query: [1, Hq, T, D].
        key: [1, Hkv, T, D].
        value: [1, Hkv, T, Dv]; Dv differs from D in multi-head latent attention (arXiv:2405.04434).
        segments: which tokens see each other; the same object for all layers.
        scaling: factor on query-key products.
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None for no window.
        softcap: products become ``softcap * tanh(products / softcap)``, or None.
        sinks: [Hq] logit that each head adds to the softmax of every token, without a value (learned attention sinks,
            arXiv:2309.17453 section 3.3), or None.

    Returns:
        [1, T, Hq, Dv], dtype of ``query``.
    """
    assert query.shape[0] == 1, f"one packed row [1, Hq, T, D] is expected, got {tuple(query.shape)}"
    assert query.shape[2] == segments.num_tokens, f"{query.shape[2]} tokens, but segments end at {segments.num_tokens}"
    assert query.shape[1] % key.shape[1] == 0, f"{query.shape[1]} query heads on {key.shape[1]} key/value heads"
    # [T, heads, D]: the layout of the variable-length kernel; a gather by token then copies contiguous memory.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if softcap is None and sinks is None and _kernel_runs_on(query, value):
        return _kernel_attention(q, k, v, segments.end_to_end, scaling, sliding_window).unsqueeze(0)
    attend = partial(_causal_attention, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks)
    return _by_bucket(q, k, v, segments.side_by_side, attend).unsqueeze(0)


def _kernel_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: EndToEnd, scaling: float, sliding_window: int | None
) -> Tensor:
    """[T, Hq, D] queries on [T, Hkv, D] keys; the last query of a segment is aligned with its last key."""
    if layout.keys is not None:
        k, v = (x.index_select(0, layout.keys) for x in (k, v))
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        layout.cu_queries,
        layout.cu_keys,
        layout.max_queries,
        layout.max_keys,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _by_bucket(q: Tensor, k: Tensor, v: Tensor, layout: SideBySide, attend: Attend) -> Tensor:
    """[T, Hq, D] on [T, Hkv, D] -> [T, Hq, Dv], one call of ``attend`` per bucket."""
    q = q.index_select(0, layout.queries)
    k, v = (x.index_select(0, layout.keys) for x in (k, v))
    of_queries, of_keys = ([b.rows * b.queries for b in layout.buckets], [b.rows * b.keys for b in layout.buckets])
    outputs = []
    by_bucket = zip(
        layout.buckets, torch.split(q, of_queries), torch.split(k, of_keys), torch.split(v, of_keys), strict=True
    )
    for bucket, *parts in by_bucket:
        rows = (x.reshape(bucket.rows, -1, *x.shape[1:]).transpose(1, 2) for x in parts)  # [rows, heads, length, D]
        outputs.append(attend(*rows).transpose(1, 2).flatten(0, 1))
    padded = torch.cat(outputs) if outputs else q[..., : v.shape[-1]]  # [P, Hq, Dv]
    return padded.index_select(0, layout.target)


def _causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[rows, Hq, Q, D] queries on [rows, Hkv, K, D] keys, the last query aligned with the last key.

    A mask [Q, K] is made only if there are more keys than queries, or the window is shorter than K.
    """
    queries, keys = query.shape[2], key.shape[2]
    mask, is_eager = None, softcap is not None or sinks is not None
    if is_eager or queries < keys or (sliding_window is not None and keys > sliding_window):
        step = torch.arange(keys, device=query.device)
        distance = step[keys - queries :].unsqueeze(1) - step  # [Q, K] tokens from key to query
        mask = (distance >= 0) & (distance < (sliding_window or keys))
    if is_eager:
        assert mask is not None
        shares = None if sinks is None else sinks.view(-1, 1, 1)
        return _eager_attention(query, key, value, mask, scaling, softcap, shares)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention without a fused kernel, for softcaps and sinks; the softmax is float32, or float64 for float64 inputs.

    ``sinks`` broadcasts to [rows, heads, queries, 1].
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    products = query @ key.transpose(-1, -2) * (scaling if softcap is None else scaling / softcap)
    if softcap is not None:
        products = softcap * torch.tanh(products)
    wide = torch.promote_types(products.dtype, torch.float32)
    products = products.to(wide).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        products = torch.cat([products, sinks.to(wide).expand(*products.shape[:-1], 1)], -1)
    probability = products.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return probability @ value


def _kernel_runs_on(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's variable-length attention takes these: NVIDIA from Ampere on, half precision, one head size."""
    size = query.shape[-1]
    return (
        query.device.type != "cpu"
        and attention_of(query.device.type) == VARLEN
        and query.dtype in (torch.float16, torch.bfloat16)
        and size % 8 == 0
        and size <= 256
        and value.shape[-1] == size
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


@dataclass(frozen=True)
class DecodeBlock:
    """Neighbouring rows of a KV buffer that are read together.

    Args:
        rows: how many.
        slots: entries that the longest of them has, that of its new token included.
    """

    rows: int
    slots: int


def ragged_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    blocks: Sequence[DecodeBlock] | None = None,
) -> Tensor:
    """Attention of the newest tokens of each row against a KV buffer; rows use different numbers of slots.

    Args:
        query: [B, Hq, Q, D], Q new tokens of each row.
        key: [B, Hkv, C, D], row b holds ``lengths[b]`` entries with that of its first new token, then those of the
            others. Slots behind them are ignored but must hold finite numbers (0 * NaN is NaN), so make the buffer with
            zeros.
        value: [B, Hkv, C, Dv], likewise; Dv differs from D in multi-head latent attention (arXiv:2405.04434).
        lengths: [B] int64, at least 1.
        scaling: factor on query-key products.
        sliding_window: number of newest entries that a token sees, including its own; None for all.
        softcap, sinks: as in ``packed_attention``.
        blocks: rows in the order of the buffer, so that short rows are not read as far as the longest; None reads all
            C slots of every row.

    Returns:
        [B, Q, Hq, Dv], dtype of ``query``.
    """
    batch, num_heads, new, size = query.shape
    assert lengths.shape == (batch,), "one length per row"
    blocks = blocks or (DecodeBlock(batch, key.shape[2]),)
    # Query heads that share a key/value head become query positions of it, so keys and values are not repeated.
    repeats = num_heads // key.shape[1]
    grouped = query.reshape(batch, key.shape[1], repeats * new, size)
    shares = None if sinks is None else sinks.view(key.shape[1], repeats, 1).repeat_interleave(new, 1)
    rows = [block.rows for block in blocks]
    outputs = []
    by_block = zip(blocks, *(x.split(rows) for x in (grouped, key, value, lengths)), strict=True)
    for block, q, k, v, filled in by_block:
        k, v = k[:, :, : block.slots], v[:, :, : block.slots]
        mask = _seen_slots(filled, block.slots, new, sliding_window)
        mask = mask if new == 1 else mask.repeat(1, 1, repeats, 1)
        if softcap is not None or sinks is not None:
            outputs.append(_eager_attention(q, k, v, mask, scaling, softcap, shares))
        else:
            outputs.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling))
    return torch.cat(outputs).view(batch, num_heads, new, value.shape[-1]).transpose(1, 2)


def _seen_slots(lengths: Tensor, slots: int, new: int = 1, sliding_window: int | None = None) -> Tensor:
    """[B, 1, new, slots] bool, the slots that each new token of a row sees; ``lengths`` count the first of them."""
    slot = torch.arange(slots, device=lengths.device)
    ends = (lengths[:, None] + torch.arange(new, device=lengths.device))[:, None, :, None]
    mask = slot < ends
    return mask if sliding_window is None else mask & (slot >= ends - sliding_window)


def unseen_slots(lengths: Tensor, blocks: Sequence[DecodeBlock], new: int) -> list[Tensor]:
    """For each block [rows, 1, 1, new, slots]: 0 where a new token sees the slot, else minus infinity."""
    masks = []
    for block, filled in zip(blocks, lengths.split([block.rows for block in blocks]), strict=True):
        seen = _seen_slots(filled, block.slots, new)[:, :, None]
        masks.append(torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf))
    return masks


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[DecodeBlock],
    unseen: Sequence[Tensor],
    scaling: float,
) -> Tensor:
    """As ``ragged_decode_attention`` by two products; for few queries on a CPU that is faster than a fused kernel.

    ``unseen`` comes from ``unseen_slots``, the same for all layers; all is float32.
    """
    batch, num_heads, new, size = query.shape
    heads = key.shape[1]
    grouped = (query * scaling).reshape(batch, heads, -1, size)
    out = query.new_empty(batch, heads, grouped.shape[2], value.shape[-1])
    start = 0
    for block, mask in zip(blocks, unseen, strict=True):
        rows = slice(start, start := start + block.rows)
        k, v = key[rows, :, : block.slots], value[rows, :, : block.slots]
        products = torch.matmul(grouped[rows], k.transpose(-1, -2))
        products.view(block.rows, heads, -1, new, block.slots).add_(mask)
        torch.matmul(products.softmax(-1), v, out=out[rows])
    return out.view(batch, num_heads, new, -1).transpose(1, 2).reshape(batch, new, num_heads, -1)
