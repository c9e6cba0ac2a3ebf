"""The project's attention, offered to transformers under one name; model code stays as its authors wrote it.

A forward pass is either *packed* (training, scoring, prefill: samples end to end in one row) or *ragged* (decoding: new
tokens of each row against a key-value buffer). Which one travels with the call as a keyword, never as global state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from rlmodule.core.contract import SequenceRanks
from rlmodule.models.alone import GoingOn
from rlmodule.models.output_head import PackedHead
from rlmodule.models.plain_blocks import PlainBlocks
from rlmodule.models.row_states import RowStates
from rlmodule.ops.attention import DecodeBlock, packed_attention, ragged_decode_attention
from rlmodule.ops.segments import SegmentBuckets

ATTENTION = "rlmodule"
LEFT_TO_THE_MASK = "left to the mask"  # the default where a model passes no window, neither a number nor None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | str | None = LEFT_TO_THE_MASK,
    softcap: float | None = None,
    segments: SegmentBuckets | None = None,
    sequence: SequenceRanks | None = None,
    key_lengths: Tensor | None = None,
    blocks: Sequence[DecodeBlock] | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1 or B, heads, T, D] -> [1 or B, T, heads, D].

    With ``sequence`` the row is cut over ranks: each gets its part of the row for its share of the heads, with the keys
    and values of the whole row, and ``segments`` are those of its part.

    Dropout is ignored on purpose: the update pass must see the same network as the pass that gave the old log-probs.
    """
    assert attention_mask is None, "its layers give their attention a mask, and this one takes none"
    window = _window_of(module) if isinstance(sliding_window, str) else sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if segments is not None:
        if sequence is not None:
            query, key, value = sequence.scatter_heads(query, key, value)
            s_aux = None if s_aux is None else sequence.own_heads(s_aux)
        out = packed_attention(
            query,
            key,
            value,
            segments,
            scale,
            sliding_window=window,
            softcap=softcap,
            sinks=s_aux,
        )
        return out if sequence is None else sequence.gather_heads(out), None
    assert key_lengths is not None, "its layers do not hand on to their attention where samples begin and end"
    return ragged_decode_attention(
        query, key, value, key_lengths, scale, sliding_window=window, softcap=softcap, sinks=s_aux, blocks=blocks
    ), None


def _window_of(module: nn.Module) -> int | None:
    """The window of a layer whose family puts it into the mask and hands none to its attention (Qwen2-MoE)."""
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


AttentionInterface.register(ATTENTION, attention_forward)


@dataclass(frozen=True, eq=False)
class Rows:
    """Where packed positions go in the cache: position t is entry ``place[t]`` of row ``row[t]``; both [T] int64."""

    row: Tensor
    place: Tensor


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, heads, slots, D], filled from the left up to ``lengths[b]`` in row b.

    There are as many slots as are needed, and some more; when they are full the buffers grow.
    """

    def __init__(self, owner: RaggedCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for the rows as they are, and some more tokens."""
        _, heads, _, width = key_states.shape
        shape = (len(self.owner.lengths), heads, self.owner.slots_for(self.owner.longest))
        self.keys = key_states.new_zeros(*shape, width)
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new entries; packed prefill attends within its own row, decoding against the buffer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        where = self.owner.writing
        if where is not None:
            self.keys[where.row, :, where.place] = key_states[0].transpose(0, 1).to(self.keys.dtype)
            self.values[where.row, :, where.place] = value_states[0].transpose(0, 1).to(self.values.dtype)
            return key_states, value_states
        batch, heads, new, _ = key_states.shape
        used = self.owner.longest + new
        if used > self.keys.shape[2]:
            slots = self.owner.slots_for(used)
            self.keys, self.values = with_slots(self.keys, slots), with_slots(self.values, slots)
        places = self.owner.places_of_new(heads, self.keys.shape[2], new)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            entries = states.reshape(batch * heads * new, -1).to(buffer.dtype)
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, places, entries)
        return self.keys[:, :, :used], self.values[:, :, :used]

    def repeat(self, rows: Tensor) -> None:
        """Row i becomes a copy of row ``rows[i]``; there may be more than before."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def join(self, other: RaggedLayer, rows: Tensor, slots: int) -> None:
        """Row i becomes a copy of number ``rows[i]`` of this layer's rows and, after them, those of ``other``.

        The other layer gives up its own at once, so that no more than one layer is there twice.
        """
        assert self.keys is not None and self.values is not None
        assert other.keys is not None and other.values is not None
        self.keys, other.keys = _joined(self.keys, other.keys, rows, slots), None
        self.values, other.values = _joined(self.values, other.values, rows, slots), None

    def move(self, target: Tensor, source: Tensor, count: int) -> None:
        """Copy rows ``source`` over rows ``target``, then drop all rows from ``count`` on."""
        assert self.keys is not None and self.values is not None
        for buffer in (self.keys, self.values):
            buffer[target] = buffer[source]
        self.keys, self.values = self.keys[:count], self.values[:count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """For transformers' mask builders; this attention uses no mask."""
        return self.owner.longest + query_length, 0

    def get_seq_length(self) -> int:
        """Entries of the longest row."""
        return self.owner.longest if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Entries a row can hold."""
        return self.owner.capacity


def with_slots(buffer: Tensor, slots: int) -> Tensor:
    """[B, heads, n, D] -> [B, heads, slots, D], new slots 0."""
    batch, heads, before, width = buffer.shape
    grown = buffer.new_zeros(batch, heads, slots, width)
    grown[:, :, :before] = buffer
    return grown


def _joined(first: Tensor, second: Tensor, rows: Tensor, slots: int) -> Tensor:
    """[len(rows), heads, slots, D] of rows of the two, counted on from the first into the second."""
    count, heads, _, width = first.shape
    joined = first.new_zeros(len(rows), heads, slots, width)
    for buffer, mine, start in ((first, rows < count, 0), (second, rows >= count, count)):
        used = min(slots, buffer.shape[2])
        joined[mine, :, :used] = buffer[rows[mine] - start, :, :used]
    return joined


GRANULE = 64  # slots by which buffers grow at least
MAX_BLOCKS = 4
WORTH_CUTTING = 0.8  # of the slots of the whole rectangle; above, more calls of the attention gain nothing


class RaggedCache(Cache):
    """Key-value cache whose rows have their own lengths: no padding token is ever computed.

    Args:
        lengths: [B] int64 entries of each row after the packed prefill.
        capacity: entries a row can hold at most.

    Attributes:
        states: what state layers keep of each row, None before the prefill.
        instead: what is kept of rows by a model that does not decode with this attention; then nothing is kept here.
        head: the head laid out for decoding, of the weights that keys and values are of; None where it is called as is.
        trunk: likewise the trunk; None where it is called as is.
    """

    states: RowStates | None = None
    instead: GoingOn | None = None
    head: PackedHead | None = None
    trunk: PlainBlocks | None = None

    def __init__(self, lengths: Tensor, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = lengths
        self.longest = int(lengths.max())
        self.writing: Rows | None = None
        self.blocks = decode_blocks(lengths.tolist())
        self._places: tuple[tuple[int, int, int], Tensor] | None = None  # of the tokens that come next
        super().__init__(layers=[])

    def slots_for(self, used: int) -> int:
        """Entries to make room for where rows have up to ``used``: half as many more, so that growing stays cheap."""
        return max(used, min(self.capacity, math.ceil(1.5 * used / GRANULE) * GRANULE))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new entries; layers are made when first seen."""
        while len(self.layers) <= layer_idx:
            self.layers.append(RaggedLayer(self))
        return self._all[layer_idx].update(key_states, value_states)

    @property
    def _ragged(self) -> list[RaggedLayer]:
        """Layers with keys and values; those of the numbers between them keep a state, or nothing."""
        return [layer for layer in self._all if layer.is_initialized]

    @property
    def _all(self) -> list[RaggedLayer]:
        return self.layers  # type: ignore[return-value]  # none of another kind is ever added

    def repeat(self, rows: Tensor) -> None:
        """Row i becomes a copy of row ``rows[i]`` in every layer; there may be more than before."""
        for layer in self._ragged:
            layer.repeat(rows)
        self._select_others(rows)
        self._now_has(rows)

    def join(self, other: RaggedCache) -> Tensor:
        """Take in the rows of ``other``, which is of no use afterwards; long rows come to stand before short ones.

        Returns:
            [B] int64 where each row comes from: a number of this cache's rows or, counted on from them, of the other's.
        """
        assert self.instead is None and other.instead is None, "rows of a cache of their own are not joined"
        lengths = torch.cat([self.lengths, other.lengths])
        rows = lengths.argsort(descending=True, stable=True)
        self.capacity = max(self.capacity, other.capacity)
        slots = self.slots_for(int(lengths.max()))
        for mine, theirs in zip(self._ragged, other._ragged, strict=True):
            mine.join(theirs, rows, slots)
        if self.states is not None and other.states is not None:
            self.states.append(other.states)
            self.states.select(rows)
        self.lengths = lengths
        self._now_has(rows)
        return rows

    def keep(self, going: Tensor) -> Tensor:
        """Drop the rows where ``going`` [b] bool is False; returns [m] the old row of each row that is left.

        The last rows fill the gaps, so that only as many rows are copied as are dropped.
        """
        count = int(going.sum())
        target = (~going[:count]).nonzero().squeeze(1)
        source = count + going[count:].nonzero().squeeze(1)
        for layer in self._ragged:
            layer.move(target, source, count)
        rows = torch.arange(count, device=going.device)
        rows[target] = source
        self._select_others(rows)
        self._now_has(rows)
        return rows

    def _select_others(self, rows: Tensor) -> None:
        for kept in (self.states, self.instead):
            if kept is not None:
                kept.select(rows)

    def _now_has(self, rows: Tensor) -> None:
        self.lengths = self.lengths.index_select(0, rows)
        self._measure()

    def _measure(self) -> None:
        lengths = self.lengths.tolist()
        self._places = None
        self.longest = max(lengths, default=0)
        self.blocks = decode_blocks(lengths)

    def places_of_new(self, heads: int, slots: int, new: int) -> Tensor:
        """[B * heads * new] int64 where new entries of every row go in a buffer [B, heads, slots, D] laid flat.

        Layers with the same sizes share it, until the next token.
        """
        sizes = (heads, slots, new)
        if self._places is None or self._places[0] != sizes:
            device = self.lengths.device
            starts = torch.arange(len(self.lengths) * heads, device=device).view(-1, heads, 1) * slots
            places = starts + self.lengths[:, None, None] + torch.arange(new, device=device)
            self._places = (sizes, places.flatten())
        return self._places[1]

    def blocks_with(self, new: int) -> list[DecodeBlock]:
        """How the rows are read once ``new`` tokens are added to each."""
        return [DecodeBlock(block.rows, block.slots + new) for block in self.blocks]

    def advance(self) -> None:
        """Count the token that was added to every row, the first where there are several."""
        self.lengths = self.lengths + 1
        self.longest += 1
        self.blocks = self.blocks_with(1)
        self._places = None

    def advance_by(self, counts: Tensor) -> None:
        """Count ``counts`` [B] further tokens of those that were added together; others are written over."""
        self.lengths = self.lengths + counts
        self._measure()


def decode_blocks(lengths: Sequence[int]) -> list[DecodeBlock]:
    """Cut rows of these lengths into a few blocks of neighbours, or none where that would save little reading."""
    count = len(lengths)
    whole = DecodeBlock(count, max(lengths, default=0))
    size = math.ceil(count / MAX_BLOCKS)
    parts = [lengths[start : start + size] for start in range(0, count, max(size, 1))]
    blocks = [DecodeBlock(len(part), max(part)) for part in parts]
    read = sum(block.rows * block.slots for block in blocks)
    return blocks if read < WORTH_CUTTING * whole.rows * whole.slots else [whole]


TRACED_ATTENTION = "rlmodule_traced"


@dataclass(frozen=True)
class AttentionCall:
    """Sizes of one call of the attention: heads, widths of keys and values, tokens of the window (None for all)."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


def trace_attention() -> list[AttentionCall]:
    """Register ``TRACED_ATTENTION``, which computes nothing and appends each call to the returned list."""
    calls: list[AttentionCall] = []

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | str | None = LEFT_TO_THE_MASK,
        **_: Any,
    ) -> tuple[Tensor, None]:
        window = _window_of(module) if isinstance(sliding_window, str) else sliding_window
        calls.append(AttentionCall(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], window))
        batch, heads, length, _width = query.shape
        return value.new_empty(batch, length, heads, value.shape[-1]), None

    AttentionInterface.register(TRACED_ATTENTION, attention)
    return calls
