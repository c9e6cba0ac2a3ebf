"""Whole samples for each rank, where ranks hold slices of one packed row: for layers whose state runs along a sample.

Such a layer can be cut neither by positions nor, without its code being rewritten, by heads. But a packed row holds
many samples, and what it computes of one does not depend on the others. So tokens are sent to the rank that has their
sample, and what comes out of the layer is sent back. Every rank makes the same plan from the borders of the segments.

Leaves out the exchange (``SequenceRanks.exchange``) and the layer (``rlmodule/models/state_layers.py``).
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rlmodule.core.slices import slice_positions
from rlmodule.ops.segments import SegmentBuckets


@dataclass(frozen=True, eq=False)
class WholeSamples:
    """What one rank sends, gets and then has.

    Args:
        segments: of its samples, end to end; there may be none.
        sent, received: tokens to and from each rank.
        leaving: [T/n] int64, places in this rank's slice in the order in which they are sent.
        arriving: [t] int64, places in what is received in the order of ``segments``.
    """

    segments: SegmentBuckets
    sent: tuple[int, ...]
    received: tuple[int, ...]
    leaving: Tensor
    arriving: Tensor


@functools.lru_cache(maxsize=4)  # all layers ask for the same row, and again when activations are recomputed
def whole_samples(row: SegmentBuckets, rank: int, size: int, num_parts: int) -> WholeSamples:
    """The plan of one of ``size`` ranks.

    Args:
        row: segments of the whole row.
        rank, size: this rank's slice, of so many.
        num_parts: parts of the row (``core/slices.py``).
    """
    borders = functional.pad(row.length.cumsum(0), (1, 0))
    prefix = _prefixes(row)
    of_segment = _owners(row.length, prefix, size)
    of_token = of_segment.repeat_interleave(row.length)  # [T] rank that gets each position
    slices = [slice_positions(borders, other, size, num_parts) for other in range(size)]
    to = of_token[slices[rank]]
    coming = [held[of_token[held] == rank] for held in slices]
    mine = (of_segment == rank).nonzero().squeeze(1)
    place = torch.full((len(row.length) + 1,), -1)  # the last one stands for no prefix
    place[mine] = torch.arange(len(mine))
    own = functional.pad(row.length[mine].cumsum(0), (1, 0))
    return WholeSamples(
        SegmentBuckets.from_cu_seqlens(own, row.device, place[prefix[mine]]),
        tuple(torch.bincount(to, minlength=size).tolist()),
        tuple(map(len, coming)),
        to.argsort(stable=True).to(row.device),
        torch.cat(coming).argsort().to(row.device),
    )


def _prefixes(row: SegmentBuckets) -> Tensor:
    """[S] segment that each continues, -1 for none."""
    filled = (row.length > 0).nonzero().squeeze(1)
    found = filled[torch.searchsorted(row.start[filled], row.prefix_start, right=True).clamp(min=1) - 1]
    return torch.where(row.prefix_length > 0, found, -1)


def _owners(length: Tensor, prefix: Tensor, size: int) -> Tensor:
    """[S] rank of each segment, those with one prefix together: most tokens first, to the rank with the fewest."""
    lengths, prefixes = length.tolist(), prefix.tolist()
    unit = [segment if before < 0 else before for segment, before in enumerate(prefixes)]
    tokens = [0] * len(lengths)
    for segment, before in enumerate(prefixes):
        tokens[unit[segment]] += lengths[segment] + (lengths[before] if before >= 0 else 0)
    loads = [(0, rank) for rank in range(size)]
    owner = [0] * len(lengths)
    for segment in sorted({*unit}, key=lambda one: (-tokens[one], one)):
        load, rank = heapq.heappop(loads)
        owner[segment] = rank
        heapq.heappush(loads, (load + tokens[segment], rank))
    return torch.tensor([owner[one] for one in unit])
