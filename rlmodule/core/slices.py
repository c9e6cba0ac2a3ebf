"""Which positions of a packed row each of its slices holds, where several ranks share the row.

A row is cut into parts whose tokens attend on different ranks (context parallelism), and each part into contiguous
slices that exchange heads (Ulysses). Causal work grows along a segment, so a segment is cut into twice as many chunks
as there are parts, and a part gets one from each end (as in Striped and Ring Attention with zig-zag order,
arXiv:2311.09431): every part then has the same work. What is left of a segment, and segments that are too short, are
dealt out in runs. Every rank computes the same cut from the borders of the segments alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlicePlace(NamedTuple):
    """Which slice of a row a rank holds.

    Args:
        size: ranks that share the row.
        rank: the place of this one among them.
        num_parts: parts whose tokens attend on different ranks.
    """

    size: int
    rank: int
    num_parts: int = 1


def part_positions(cu_seqlens: Tensor, num_parts: int) -> Tensor:
    """Positions of each part, in the order of the row.

    Args:
        cu_seqlens: [S+1] int, first position of each segment and the end of the row, T; a multiple of ``num_parts``.
        num_parts: equal parts.

    Returns:
        [num_parts, T/num_parts] int64 on the CPU.
    """
    length = cu_seqlens.to("cpu", torch.int64).diff()
    total = int(length.sum())
    assert total % num_parts == 0, f"{total} positions do not split over {num_parts} parts"
    if num_parts == 1:
        return torch.arange(total)[None]
    chunk = length // (2 * num_parts)  # [S] tokens of a chunk
    segment = torch.arange(len(length)).repeat_interleave(length)  # [T]
    offset = torch.arange(total) - (length.cumsum(0) - length)[segment]
    in_chunk = offset < (2 * num_parts * chunk)[segment]
    number = offset // chunk[segment].clamp(min=1)
    part = torch.minimum(number, 2 * num_parts - 1 - number)
    left = (~in_chunk).nonzero().squeeze(1)
    part[left] = torch.arange(len(left)) * num_parts // max(1, len(left))
    return torch.argsort(part, stable=True).view(num_parts, -1)


def slice_positions(cu_seqlens: Tensor, rank: int, size: int, num_parts: int = 1) -> Tensor:
    """[T/size] int64, positions of slice ``rank`` of ``size``; the slices of a part follow each other."""
    per_part = size // num_parts
    part, place = divmod(rank, per_part)
    held = part_positions(cu_seqlens, num_parts)[part]
    width, rest = divmod(len(held), per_part)
    assert rest == 0, f"{len(held)} positions of a part do not split over {per_part} sequence ranks"
    return held[place * width : (place + 1) * width]
