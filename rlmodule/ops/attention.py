"""Causal attention inside each segment of a packed row, and of one new token against a ragged KV buffer.

No [T, T] mask exists anywhere. On CUDA in half precision PyTorch's variable-length kernel reads the segment borders;
elsewhere segments of alike length are laid side by side and run as one batched causal call. A segment shorter than its
bucket is padded on the right with copies of its own last token: under causality no real token sees them, so no mask is
needed, and nothing of another segment, not even a NaN, can get in.

A segment may go on from another one, its prefix: its tokens see all of the prefix, and the prefix is computed once for
all segments that go on from it (responses to one prompt). Its keys are then those of the prefix and its own, gathered.
Leaves out rotary positions, and the exchange of heads between sequence ranks.

``S`` segments, ``Hq`` query heads, ``Hkv`` key/value heads (Hq a multiple of Hkv), ``D`` head size, ``C`` slots of a KV
buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

# Share of a bucket's positions that may be padding. Forward and backward of 64 to 256 segments on one CPU core take the
# same time from 0 to 0.05 and 7 to 15 % more at 0.15: a call is cheap, padding is not.
MAX_WASTE = 0.05


@dataclass(frozen=True)
class Bucket:
    """Segments of alike length, laid side by side.

    Args:
        rows: segments.
        queries: padded length of what is computed.
        keys: padded length of what is seen; the first ``keys - queries`` belong to prefixes of just that length.
    """

    rows: int
    queries: int
    keys: int


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Where the tokens of a packed row go when its segments are sorted into buckets.

    Args:
        buckets: in the order in which they lie.
        queries: [P] int64, packed position behind each of the P padded query positions, bucket after bucket.
        keys: the same of the padded key positions.
        target: [T] int64, padded query position of each packed position.
    """

    buckets: tuple[Bucket, ...]
    queries: Tensor
    keys: Tensor
    target: Tensor


@dataclass(frozen=True, eq=False)
class EndToEnd:
    """What the kernel of variable length reads.

    Args:
        cu_queries: [S+1] int32, first query of each segment and the end of the row.
        cu_keys: [S+1] int32, the same of its keys.
        max_queries, max_keys: of any segment.
        keys: [K] int64, packed position of each key, or None where the keys are the row as it is.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    keys: Tensor | None


@dataclass(frozen=True, eq=False)
class SegmentBuckets:
    """Which tokens of a packed row see each other, in the form that a way to attend wants, made when it first asks.

    Depends on the segment borders alone: build it once per micro-batch and hand it to every layer.

    Args:
        start: [S] int64 on the host, first position of each segment.
        length: [S] int64 on the host, tokens of each.
        prefix: [S] int64 on the host, the segment that each goes on from, -1 for none. No prefix has one itself.
        num_tokens: T, tokens of the packed row.
        device: where the tokens live.
    """

    start: Tensor
    length: Tensor
    prefix: Tensor
    num_tokens: int
    device: torch.device

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, device: torch.device | str | None = None, prefix: Tensor | None = None
    ) -> SegmentBuckets:
        """Read the borders of the segments.

        Args:
            cu_seqlens: [S+1] int, on the host if it can be: values on a device are waited for.
            device: where the tokens live; by default where ``cu_seqlens`` is.
            prefix: [S] int, the segment that each goes on from, -1 for none; None where none does.
        """
        borders = cu_seqlens.to("cpu", torch.int64)
        length = borders.diff()
        assert borders[0] == 0, "cu_seqlens starts at 0"
        assert bool((length >= 0).all()), "cu_seqlens never falls"
        if prefix is None:
            prefix = torch.full_like(length, -1)
        assert bool((prefix[prefix[prefix >= 0]] < 0).all()), "a prefix goes on from no other segment"
        where = cu_seqlens.device if device is None else torch.device(device)
        return cls(borders[:-1], length, prefix, int(borders[-1]), where)

    @cached_property
    def side_by_side(self) -> SideBySide:
        """Buckets, those without prefix first, each kind from the longest segment down."""
        # Lower-right causality needs a mask [queries, keys]. Behind a prefix shorter than the segment it is cheaper to
        # compute the prefix's queries again, under plain causality, and to drop them.
        before = torch.where(self._before > self.length, self._before, 0)  # [S] keys that no query of the bucket has
        width = self._before + self.length - before
        order = torch.argsort(width, descending=True, stable=True)
        order = order[torch.argsort(before[order], stable=True)]
        order = order[self.length[order] > 0]
        buckets, queries, keys = [], [], []
        target = torch.empty(self.num_tokens, dtype=torch.int64)
        first = place = 0
        for bucket in _buckets(before[order].tolist(), width[order].tolist()):
            members = order[first : first + bucket.rows].unsqueeze(1)  # [rows, 1]
            column = torch.arange(bucket.keys)
            last = self._before[members] + self.length[members] - 1
            seen = self._position(members, torch.minimum(column, last))  # [rows, keys]
            computed = seen[:, bucket.keys - bucket.queries :]
            is_own = ((column >= self._before[members]) & (column <= last))[:, bucket.keys - bucket.queries :]
            target[computed[is_own]] = place + is_own.flatten().nonzero().squeeze(1)
            buckets.append(bucket)
            queries.append(computed.flatten())
            keys.append(seen.flatten())
            first, place = first + bucket.rows, place + computed.numel()
        return SideBySide(
            tuple(buckets), self._moved(_joined(queries)), self._moved(_joined(keys)), self._moved(target)
        )

    @cached_property
    def end_to_end(self) -> EndToEnd:
        """Queries as they lie; keys gathered where there are prefixes."""
        count = self._before + self.length  # [S] keys
        cu_queries, cu_keys = (self._moved(_cumulated(x)) for x in (self.length, count))
        longest = [int(x.max()) if len(x) else 0 for x in (self.length, count)]
        keys = None
        if bool((self.prefix >= 0).any()):
            segment = torch.arange(len(count)).repeat_interleave(count)
            column = torch.arange(len(segment)) - (count.cumsum(0) - count)[segment]
            keys = self._moved(self._position(segment, column))
        return EndToEnd(cu_queries, cu_keys, longest[0], longest[1], keys)

    @cached_property
    def _before(self) -> Tensor:
        """[S] tokens of each segment's prefix."""
        return torch.where(self.prefix >= 0, self.length[self.prefix], 0)

    def _position(self, segment: Tensor, column: Tensor) -> Tensor:
        """Packed position of the ``column``-th token that the last token of ``segment`` sees."""
        before = self._before[segment]
        in_prefix = self.start[self.prefix[segment]] + column
        return torch.where(column < before, in_prefix, self.start[segment] + column - before)

    def _moved(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def _cumulated(length: Tensor) -> Tensor:
    """[S] lengths -> [S+1] int32 borders."""
    return functional.pad(length.cumsum(0), (1, 0)).to(torch.int32)


def _buckets(before: Sequence[int], widths: Sequence[int]) -> list[Bucket]:
    """Falling widths, for each length of prefix, cut greedily into runs whose padding stays within ``MAX_WASTE``."""
    found: list[Bucket] = []
    tokens = 0  # of the last bucket, without padding
    for ahead, width in zip(before, widths, strict=True):
        last = found[-1] if found else Bucket(0, 0, 0)
        room = last.queries * (last.rows + 1)
        if last.rows and last.keys - last.queries == ahead and room - (tokens + width) <= MAX_WASTE * room:
            found[-1] = Bucket(last.rows + 1, last.queries, last.keys)
            tokens += width
        else:
            found.append(Bucket(1, width, ahead + width))
            tokens = width
    return found


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
    """Causal attention of every segment of one packed row to its prefix and itself; differentiable.

    Args:
        query: [1, Hq, T, D].
        key, value: [1, Hkv, T, D].
        segments: which tokens see each other; the same object for all layers.
        scaling: factor on query-key products.
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None for all before it.
        softcap: products become ``softcap * tanh(products / softcap)``, or None.
        sinks: [Hq] a product that each head adds to every token's softmax and whose share then goes nowhere (learned
            sinks, arXiv:2309.17453 section 3.3), or None.

    Returns:
        [1, T, Hq, D], dtype of ``query``.
    """
    assert query.shape[0] == 1, f"one packed row [1, Hq, T, D] is expected, got {tuple(query.shape)}"
    assert query.shape[2] == segments.num_tokens, f"{query.shape[2]} tokens, but segments end at {segments.num_tokens}"
    assert query.shape[1] % key.shape[1] == 0, f"{query.shape[1]} query heads on {key.shape[1]} key/value heads"
    # Token-major [T, heads, D]: what a kernel of variable length reads, and what one row gather moves whole.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if softcap is None and sinks is None and _kernel_runs_on(query):
        return _kernel_attention(q, k, v, segments.end_to_end, scaling, sliding_window).unsqueeze(0)

    layout = segments.side_by_side
    q = q.index_select(0, layout.queries)
    k, v = (x.index_select(0, layout.keys) for x in (k, v))
    of_queries, of_keys = ([b.rows * b.queries for b in layout.buckets], [b.rows * b.keys for b in layout.buckets])
    outputs = []
    by_bucket = zip(
        layout.buckets, torch.split(q, of_queries), torch.split(k, of_keys), torch.split(v, of_keys), strict=True
    )
    for bucket, *parts in by_bucket:
        side_by_side = (
            x.reshape(bucket.rows, -1, *x.shape[1:]).transpose(1, 2) for x in parts
        )  # [rows, heads, length, D]
        done = _causal_attention(
            *side_by_side, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks
        )
        outputs.append(done.transpose(1, 2).flatten(0, 1))
    padded = torch.cat(outputs) if outputs else q  # [P, Hq, D]
    return padded.index_select(0, layout.target).unsqueeze(0)


def _kernel_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: EndToEnd, scaling: float, sliding_window: int | None
) -> Tensor:
    """[T, Hq, D] on [T, Hkv, D]; the last query of a segment is aligned with its last key."""
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
    """[rows, Hq, Q, D] on [rows, Hkv, K, D], the last query on the last key.

    A mask [Q, K] only where there are more keys than queries, or the window is shorter than K.
    """
    queries, keys = query.shape[2], key.shape[2]
    mask, is_written_out = None, softcap is not None or sinks is not None
    if is_written_out or queries < keys or (sliding_window is not None and keys > sliding_window):
        step = torch.arange(keys, device=query.device)
        distance = step[keys - queries :].unsqueeze(1) - step  # [Q, K] how far back the key is
        mask = (distance >= 0) & (distance < (sliding_window or keys))
    if is_written_out:
        assert mask is not None
        shares = None if sinks is None else sinks.view(-1, 1, 1)
        return _written_out_attention(query, key, value, mask, scaling, softcap, shares)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _written_out_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """For a cap or for sinks (as wide as [rows, heads, queries, 1]), which no fused kernel knows here; softmax in
    float32 or better."""
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
    sinks: Tensor | None = None,
) -> Tensor:
    """One new token per row against a KV buffer of which each row uses a part.

    Args:
        query: [B, Hq, 1, D].
        key, value: [B, Hkv, C, D], row b holds ``lengths[b]`` entries, the new token's own last. Slots behind them are
            ignored but must hold finite numbers (0 * NaN is NaN), so make the buffer with zeros.
        lengths: [B] int64, at least 1.
        scaling: factor on query-key products.
        sliding_window: the newest entries a token sees, its own included; None for all.
        softcap, sinks: as in ``packed_attention``.

    Returns:
        [B, 1, Hq, D], dtype of ``query``.
    """
    batch, num_heads, one, size = query.shape
    assert one == 1, f"one new token per row is expected, got {one}"
    assert lengths.shape == (batch,), "one length per row"
    slot = torch.arange(key.shape[2], device=query.device)
    mask = slot < lengths.unsqueeze(1)  # [B, C]
    if sliding_window is not None:
        mask = mask & (slot >= (lengths - sliding_window).unsqueeze(1))
    mask = mask[:, None, None, :]
    # Query heads that share a key/value head become its query positions, so keys and values are not repeated.
    grouped = query.reshape(batch, key.shape[1], num_heads // key.shape[1], size)
    if softcap is not None or sinks is not None:
        shares = None if sinks is None else sinks.view(key.shape[1], -1, 1)
        out = _written_out_attention(grouped, key, value, mask, scaling, softcap, shares)
    else:
        out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, 1, num_heads, size)
