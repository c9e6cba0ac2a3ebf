"""Causal attention inside each segment of a packed row, and of one new token against a ragged KV buffer.

No [T, T] mask exists anywhere. On CUDA in half precision PyTorch's variable-length kernel reads the segment borders;
elsewhere segments of alike length are laid side by side and run as one batched causal call. A segment shorter than its
bucket is padded on the right with copies of its own last token: under causality no real token sees them, so no mask is
needed, and nothing of another segment, not even a NaN, can get in.
Leaves out rotary positions, attention sinks, and the exchange of heads between sequence ranks.

``Hq`` query heads, ``Hkv`` key/value heads (Hq a multiple of Hkv), ``D`` head size, ``S`` slots of a KV buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

# Share of a bucket's positions that may be padding. Forward and backward of 64 to 256 segments on one CPU core take the
# same time from 0 to 0.05 and 7 to 15 % more at 0.15: a call is cheap, padding is not.
MAX_WASTE = 0.05


@dataclass(frozen=True, eq=False)
class SegmentBuckets:
    """Where the tokens of a packed row go when its segments are sorted into buckets of alike length.

    Depends on the segment borders alone: build it once per micro-batch and hand it to every layer.

    Args:
        cu_seqlens: [B+1] int32 on the device of the tokens, first position of each segment and the end of the row.
        shapes: (segments, padded length) of each bucket.
        source: [P] int64 on that device, packed position behind each of the P padded positions, bucket after bucket.
        target: [T] int64 on that device, padded position of each packed position.
        max_length: tokens of the longest segment.
    """

    cu_seqlens: Tensor
    shapes: tuple[tuple[int, int], ...]
    source: Tensor
    target: Tensor
    max_length: int

    @property
    def num_tokens(self) -> int:
        """T, tokens of the packed row."""
        return len(self.target)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, device: torch.device | str | None = None) -> SegmentBuckets:
        """Sort the segments into buckets, longest first.

        Args:
            cu_seqlens: [B+1] int, on the host if it can be: values on a device are waited for.
            device: where the tokens live; by default where ``cu_seqlens`` is.
        """
        device = cu_seqlens.device if device is None else device
        borders = cu_seqlens.to("cpu", torch.int64)
        lengths = borders.diff()
        assert borders[0] == 0, "cu_seqlens starts at 0"
        assert bool((lengths >= 0).all()), "cu_seqlens never falls"
        longest_first = torch.argsort(lengths, descending=True, stable=True)
        longest_first = longest_first[lengths[longest_first] > 0]

        shapes = tuple(_bucket_shapes(lengths[longest_first].tolist()))
        source: list[Tensor] = []
        target = torch.empty(int(borders[-1]), dtype=torch.int64)
        start = offset = 0
        for rows, width in shapes:
            members = longest_first[start : start + rows]
            step = torch.arange(width)
            last = (lengths[members] - 1).unsqueeze(1)  # [rows, 1]
            inside = borders[members].unsqueeze(1) + torch.minimum(step, last)  # [rows, width]
            place = offset + torch.arange(rows * width).reshape(rows, width)
            is_real = step <= last
            target[inside[is_real]] = place[is_real]
            source.append(inside.flatten())
            start, offset = start + rows, offset + rows * width
        return cls(
            cu_seqlens=cu_seqlens.to(device, torch.int32),
            shapes=shapes,
            source=torch.cat(source).to(device) if source else torch.empty(0, dtype=torch.int64, device=device),
            target=target.to(device),
            max_length=int(lengths.max()) if len(lengths) else 0,
        )


def _bucket_shapes(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Falling lengths cut greedily into runs whose padding stays within ``MAX_WASTE``: (segments, padded length)."""
    shapes: list[tuple[int, int]] = []
    rows = width = tokens = 0
    for length in lengths:
        if rows and width * (rows + 1) - (tokens + length) <= MAX_WASTE * width * (rows + 1):
            rows, tokens = rows + 1, tokens + length
        else:
            if rows:
                shapes.append((rows, width))
            rows, width, tokens = 1, length, length
    if rows:
        shapes.append((rows, width))
    return shapes


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    buckets: SegmentBuckets | None = None,
) -> Tensor:
    """Causal attention of every segment of one packed row to itself; differentiable.

    Args:
        query: [1, Hq, T, D].
        key, value: [1, Hkv, T, D].
        cu_seqlens: [B+1] int32, first position of each segment and the end of the row.
        scaling: factor on query-key products.
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None for all before it.
        softcap: products become ``softcap * tanh(products / softcap)``, or None.
        buckets: the plan for ``cu_seqlens``, built once and shared by all layers; built here when missing.

    Returns:
        [1, T, Hq, D], dtype of ``query``.
    """
    if buckets is None:
        buckets = SegmentBuckets.from_cu_seqlens(cu_seqlens, query.device)
    assert query.shape[0] == 1, f"one packed row [1, Hq, T, D] is expected, got {tuple(query.shape)}"
    assert query.shape[2] == buckets.num_tokens, f"{query.shape[2]} tokens, but cu_seqlens ends at {buckets.num_tokens}"
    assert query.shape[1] % key.shape[1] == 0, f"{query.shape[1]} query heads on {key.shape[1]} key/value heads"
    # Token-major [T, heads, D]: what a kernel of variable length reads, and what one row gather moves whole.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if softcap is None and _kernel_runs_on(query):
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        out = varlen_attn(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            buckets.cu_seqlens,
            buckets.cu_seqlens,
            buckets.max_length,
            buckets.max_length,
            scale=scaling,
            window_size=window,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(out, Tensor)
        return out.unsqueeze(0)

    q, k, v = (x.index_select(0, buckets.source) for x in (q, k, v))
    outputs = []
    sizes = [rows * width for rows, width in buckets.shapes]
    by_bucket = zip(buckets.shapes, *(torch.split(x, sizes) for x in (q, k, v)), strict=True)
    for (rows, width), *parts in by_bucket:
        side_by_side = (
            x.reshape(rows, width, -1, x.shape[-1]).transpose(1, 2) for x in parts
        )  # [rows, heads, width, D]
        done = _causal_attention(*side_by_side, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
        outputs.append(done.transpose(1, 2).flatten(0, 1))
    padded = torch.cat(outputs) if outputs else q  # [P, Hq, D]
    return padded.index_select(0, buckets.target).unsqueeze(0)


def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None, softcap: float | None
) -> Tensor:
    """[rows, Hq, L, D] on [rows, Hkv, L, D]; a band mask [L, L] only where the window is shorter than L."""
    length = query.shape[2]
    mask = None
    if softcap is not None or (sliding_window is not None and length > sliding_window):
        step = torch.arange(length, device=query.device)
        distance = step.unsqueeze(1) - step  # [L, L] how far back the key is
        mask = (distance >= 0) & (distance < (sliding_window or length))
    if softcap is not None:
        assert mask is not None
        return _capped_attention(query, key, value, mask, scaling, softcap)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float
) -> Tensor:
    """Attention written out, for a cap that no fused kernel knows; softmax in float32 or better."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    products = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap))
    wide = torch.promote_types(products.dtype, torch.float32)
    probability = products.to(wide).masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype)
    return probability @ value


def _kernel_runs_on(x: Tensor) -> bool:
    """Whether PyTorch's variable-length attention takes this tensor: NVIDIA from Ampere on, half precision."""
    return (
        x.device.type == "cuda"
        and torch.version.hip is None
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.shape[-1] % 8 == 0
        and x.shape[-1] <= 256
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def ragged_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One new token per row against a KV buffer of which each row uses a part.

    Args:
        query: [B, Hq, 1, D].
        key, value: [B, Hkv, S, D], row b holds ``lengths[b]`` entries, the new token's own last. Slots behind them are
            ignored but must hold finite numbers (0 * NaN is NaN), so make the buffer with zeros.
        lengths: [B] int64, at least 1.
        scaling: factor on query-key products.
        sliding_window: the newest entries a token sees, its own included; None for all.
        softcap: as in ``packed_attention``.

    Returns:
        [B, 1, Hq, D], dtype of ``query``.
    """
    batch, num_heads, one, size = query.shape
    assert one == 1, f"one new token per row is expected, got {one}"
    assert lengths.shape == (batch,), "one length per row"
    slot = torch.arange(key.shape[2], device=query.device)
    mask = slot < lengths.unsqueeze(1)  # [B, S]
    if sliding_window is not None:
        mask = mask & (slot >= (lengths - sliding_window).unsqueeze(1))
    mask = mask[:, None, None, :]
    # Query heads that share a key/value head become its query positions, so keys and values are not repeated.
    grouped = query.reshape(batch, key.shape[1], num_heads // key.shape[1], size)
    if softcap is not None:
        out = _capped_attention(grouped, key, value, mask, scaling, softcap)
    else:
        out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, 1, num_heads, size)
