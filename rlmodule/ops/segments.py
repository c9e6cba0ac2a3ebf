"""Which tokens of a packed row see each other: its segments, their prefixes, and the layouts that attention needs.

No [T, T] mask is ever made. A variable-length kernel reads the segment borders. Without one, segments of similar length
are batched in buckets. A segment shorter than its bucket is padded on the right with copies of its own last token: a
causal mask hides them from all real tokens, so no further mask is needed, and nothing of another segment (such as a
NaN) can leak in.

A segment may continue another one, its prefix: its tokens see the whole prefix, which is computed once for all segments
that continue it (the responses to one prompt). The keys of such a segment are gathered from the prefix and itself.

Where ranks share a row, each computes the queries of its part of it (``core/slices.py``) against the keys of the whole
row. A run of consecutive queries then stands for a segment: its keys are those of the segment up to its last query.
The attention is in ``attention.py``. ``S`` is the number of segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from rlmodule.core.slices import part_positions

# Largest share of padding in a bucket. Measured on one CPU core, forward and backward of 64 to 256 segments: the same
# time from 0 to 0.05, and 7 to 15 % more at 0.15, because a call is cheap and padding is not.
MAX_WASTE = 0.05
# Likewise where a call of a whole layer is made for each bucket, with many small operations in it.
MAX_WASTE_OF_STATES = 0.25


@dataclass(frozen=True)
class Bucket:
    """A batch of segments of similar length.

    Args:
        rows: number of segments.
        queries: padded number of query positions of each.
        keys: padded number of key positions of each; the first ``keys - queries`` are the prefix.
    """

    rows: int
    queries: int
    keys: int


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Index maps between a packed row and its buckets.

    Args:
        buckets: the buckets, in the order of the maps.
        queries: [P] int64, packed position of each padded query position, bucket after bucket.
        keys: int64, packed position of each padded key position, bucket after bucket.
        target: [T] int64, padded query position of each packed position.
        segment: int64 on the CPU, segment of each row, bucket after bucket.
    """

    buckets: tuple[Bucket, ...]
    queries: Tensor
    keys: Tensor
    target: Tensor
    segment: Tensor

    def rows_of(self, packed: Tensor) -> Iterator[Tensor]:
        """[T, ...] of a packed row -> [rows, length, ...] of each bucket."""
        parts = packed.index_select(0, self.queries).split([b.rows * b.queries for b in self.buckets])
        for bucket, part in zip(self.buckets, parts, strict=True):
            yield part.unflatten(0, (bucket.rows, bucket.queries))

    def packed_of(self, rows: Sequence[Tensor]) -> Tensor:
        """[rows, length, ...] of each bucket -> [T, ...] of the packed row."""
        return torch.cat([part.flatten(0, 1) for part in rows]).index_select(0, self.target)


@dataclass(frozen=True, eq=False)
class EndToEnd:
    """Inputs of the variable-length kernel.

    Args:
        cu_queries: [S+1] int32, first query of each segment and the end of the row.
        cu_keys: [S+1] int32, first key of each segment and the end of all keys.
        max_queries, max_keys: most queries and keys of a segment.
        keys: [K] int64, packed position of each key; None without prefixes, when keys are in packed order.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    keys: Tensor | None


@dataclass(frozen=True, eq=False)
class RowPart:
    """A part of a packed row, where runs of its queries stand for segments.

    Args:
        ahead: [S] int64, tokens of the same segment before the first query of each run.
        query_place: [T] int64, place of each position of the row among the queries; -1 where another rank has it.
        key_place: [T] int64, place of each position of the row among the keys.
        row: segments of the whole row.
    """

    ahead: Tensor
    query_place: Tensor
    key_place: Tensor
    row: SegmentBuckets


@dataclass(frozen=True, eq=False)
class SegmentBuckets:
    """The segments of a packed row; each layout is computed when it is first used.

    Build it once per micro-batch and pass it to every layer.

    Args:
        start: [S] int64 on the CPU, first position of each segment.
        length: [S] int64 on the CPU, tokens of each segment.
        prefix_start, prefix_length: [S] int64 on the CPU, of the segment that each continues; length 0 for none.
        num_tokens: T, tokens of the packed row.
        device: device of the tokens.
        part: where only a part of the row has its queries here; None for all of it.
    """

    start: Tensor
    length: Tensor
    prefix_start: Tensor
    prefix_length: Tensor
    num_tokens: int
    device: torch.device
    part: RowPart | None = None

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, device: torch.device | str | None = None, prefix: Tensor | None = None
    ) -> SegmentBuckets:
        """Build from the borders of the segments.

        Args:
            cu_seqlens: [S+1] int, preferably on the CPU: reading it from a device synchronises.
            device: device of the tokens; by default that of ``cu_seqlens``.
            prefix: [S] int, segment that each segment continues, -1 for none; None if no segment has a prefix.
        """
        borders = cu_seqlens.to("cpu", torch.int64)
        length = borders.diff()
        assert borders[0] == 0, "cu_seqlens starts at 0"
        assert bool((length >= 0).all()), "cu_seqlens never falls"
        if prefix is None:
            prefix = torch.full_like(length, -1)
        assert bool((prefix[prefix[prefix >= 0]] < 0).all()), "a prefix must not have a prefix itself"
        token_device = cu_seqlens.device if device is None else torch.device(device)
        prefix_length = torch.where(prefix >= 0, length[prefix], 0)
        return cls(borders[:-1], length, borders[:-1][prefix], prefix_length, int(borders[-1]), token_device)

    def padded(self, count: int) -> SegmentBuckets:
        """Those of a whole row with a segment of ``count`` padding tokens at its end, which nothing else sees."""
        assert self.part is None, "a part of a row is not padded"
        nothing = torch.zeros(1, dtype=torch.int64)
        return replace(
            self,
            start=torch.cat([self.start, torch.tensor([self.num_tokens])]),
            length=torch.cat([self.length, torch.tensor([count])]),
            prefix_start=torch.cat([self.prefix_start, nothing]),
            prefix_length=torch.cat([self.prefix_length, nothing]),
            num_tokens=self.num_tokens + count,
        )

    def of_part(self, part: int, num_parts: int) -> SegmentBuckets:
        """The queries of one of the parts that ranks share a row by, against the keys of all parts, laid end to end."""
        if num_parts == 1:
            return self
        borders = functional.pad(self.length.cumsum(0), (1, 0))
        positions = part_positions(borders, num_parts)
        held = positions[part]
        segment = torch.searchsorted(borders, held, right=True) - 1
        begins = torch.ones_like(held, dtype=torch.bool)
        begins[1:] = (held.diff() != 1) | (segment.diff() != 0)
        first = begins.nonzero().squeeze(1)  # [S] of the runs, which stand for segments from here on
        of_run = segment[first]
        return replace(
            self,
            start=held[first],
            length=functional.pad(first, (0, 1), value=len(held)).diff(),
            prefix_start=self.prefix_start[of_run],
            prefix_length=self.prefix_length[of_run],
            num_tokens=len(held),
            part=RowPart(
                ahead=held[first] - self.start[of_run],
                query_place=_inverse(held, borders[-1]),
                key_place=_inverse(positions.flatten(), borders[-1]),
                row=self,
            ),
        )

    @cached_property
    def side_by_side(self) -> SideBySide:
        """Buckets by falling segment length, those without prefix first."""
        # Fewer queries than keys need a mask [queries, keys]. With a prefix shorter than the segment it is cheaper to
        # compute the queries of the prefix again, under a plain causal mask, and to drop them; unless another rank has
        # them.
        keep = torch.ones_like(self.length, dtype=torch.bool) if self.part is not None else self._before > self.length
        return self._in_buckets(torch.where(keep, self._before, 0), MAX_WASTE)

    @cached_property
    def whole(self) -> SideBySide:
        """Buckets of whole samples, each with its prefix before it: for layers whose state runs along a row."""
        return self._in_buckets(torch.zeros_like(self.length), MAX_WASTE_OF_STATES)

    @cached_property
    def whole_unpadded(self) -> SideBySide:
        """As ``whole``, samples of one length to a bucket: for states that are kept, which padding would go on with."""
        return self._in_buckets(torch.zeros_like(self.length), 0.0)

    def _in_buckets(self, before: Tensor, max_waste: float) -> SideBySide:
        """``before``: [S] keys of each segment that have no query."""
        width = self._before + self.length - before
        order = torch.argsort(width, descending=True, stable=True)
        order = order[torch.argsort(before[order], stable=True)]
        order = order[self.length[order] > 0]
        buckets, queries, keys = [], [], []
        target = torch.empty(self.num_tokens, dtype=torch.int64)
        first = end = 0
        for bucket in _buckets(before[order].tolist(), width[order].tolist(), max_waste):
            members = order[first : first + bucket.rows].unsqueeze(1)  # [rows, 1]
            column = torch.arange(bucket.keys)
            last = self._before[members] + self.length[members] - 1
            seen = self._position(members, torch.minimum(column, last))  # [rows, keys]
            computed = seen[:, bucket.keys - bucket.queries :]
            is_own = ((column >= self._before[members]) & (column <= last))[:, bucket.keys - bucket.queries :]
            target[self._query_place(computed[is_own])] = end + is_own.flatten().nonzero().squeeze(1)
            buckets.append(bucket)
            queries.append(self._query_place(computed.flatten()))
            keys.append(self._key_place(seen.flatten()))
            first, end = first + bucket.rows, end + computed.numel()
        return SideBySide(
            tuple(buckets),
            self._to_device(_concatenate(queries)),
            self._to_device(_concatenate(keys)),
            self._to_device(target),
            order,
        )

    @cached_property
    def end_to_end(self) -> EndToEnd:
        """Queries in packed order; keys gathered if there are prefixes."""
        count = self._before + self.length  # [S] keys
        cu_queries, cu_keys = (self._to_device(_cumulative(x)) for x in (self.length, count))
        longest = [int(x.max()) if len(x) else 0 for x in (self.length, count)]
        keys = None
        if self.part is not None or bool((self.prefix_length > 0).any()):
            segment = torch.arange(len(count)).repeat_interleave(count)
            column = torch.arange(len(segment)) - (count.cumsum(0) - count)[segment]
            keys = self._to_device(self._key_place(self._position(segment, column)))
        return EndToEnd(cu_queries, cu_keys, longest[0], longest[1], keys)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample: a segment with its prefix."""
        return int((self._before + self.length).max()) if len(self.length) else 0

    @cached_property
    def _before(self) -> Tensor:
        """[S] keys before the first query of each segment: those of its prefix, and of its own on other ranks."""
        return self.prefix_length if self.part is None else self.prefix_length + self.part.ahead

    def _position(self, segment: Tensor, column: Tensor) -> Tensor:
        """Packed position of key number ``column`` of ``segment``, counted from the start of its prefix."""
        in_prefix = self.prefix_start[segment] + column
        in_segment = self.start[segment] + column - self._before[segment]
        return torch.where(column < self.prefix_length[segment], in_prefix, in_segment)

    def _query_place(self, position: Tensor) -> Tensor:
        return position if self.part is None else self.part.query_place[position]

    def _key_place(self, position: Tensor) -> Tensor:
        return position if self.part is None else self.part.key_place[position]

    def _to_device(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)


def _inverse(positions: Tensor, total: Tensor) -> Tensor:
    """[P] positions -> [total] place of each position among them, -1 where it is not."""
    place = torch.full((int(total),), -1)
    place[positions] = torch.arange(len(positions))
    return place


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def _cumulative(length: Tensor) -> Tensor:
    """[S] lengths -> [S+1] int32 borders."""
    return functional.pad(length.cumsum(0), (1, 0)).to(torch.int32)


def _buckets(before: Sequence[int], widths: Sequence[int], max_waste: float = MAX_WASTE) -> list[Bucket]:
    """Split segments greedily into buckets whose share of padding stays within ``max_waste``.

    Args:
        before: [S] keys without a query, equal values in a row.
        widths: [S] queries, falling within equal ``before``.
    """
    buckets: list[Bucket] = []
    tokens = 0  # queries of the last bucket, without padding
    for ahead, width in zip(before, widths, strict=True):
        last = buckets[-1] if buckets else Bucket(0, 0, 0)
        room = last.queries * (last.rows + 1)
        if last.rows and last.keys - last.queries == ahead and room - (tokens + width) <= max_waste * room:
            buckets[-1] = Bucket(last.rows + 1, last.queries, last.keys)
            tokens += width
        else:
            buckets.append(Bucket(1, width, ahead + width))
            tokens = width
    return buckets
