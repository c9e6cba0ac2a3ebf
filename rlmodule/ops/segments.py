"""Which tokens of a packed row see each other: segments, prefixes they go on from, and the layouts attention works in.

No [T, T] mask exists anywhere. A kernel of variable length reads the segment borders. Elsewhere segments of alike
length are laid side by side, in buckets; one shorter than its bucket is padded on the right with copies of its own last
token: under causality no real token sees them, so no mask is needed, and nothing of another segment, not even a NaN,
can get in.

A segment may go on from another one, its prefix: its tokens see all of the prefix, and the prefix is computed once for
all segments that go on from it (responses to one prompt). Its keys are then those of the prefix and its own, gathered.
Leaves out the attention itself (``attention.py``). ``S`` segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

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
    def longest(self) -> int:
        """Tokens of the longest sample: a segment with its prefix."""
        return int((self._before + self.length).max()) if len(self.length) else 0

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
