"""Whole tensors from the shards of several processes, many of them with one collective.

A model has hundreds of tensors, most of them small, and to start a collective takes as long for a norm as for a matrix.
So shards travel in buckets, as bytes whatever their types, and each in the type that it is wanted in. Leaves out where
shards come from (the backends) and what whole tensors are for (``generation_copy.py``, exports, engines).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Item = TypeVar("Item")
Names = tuple[str, ...]  # all names of a parameter, before sharding
Casting = Callable[[Names, Tensor], Tensor]  # a tensor, or any part of it, in the type that it is wanted in

# Bytes of whole tensors. At 100 GB/s they take 0.6 ms, beside which the tens of microseconds that a collective needs to
# start are little; and a process holds them twice for a moment, which is little beside a model.
BUCKET_BYTES = 64 * 2**20


def as_held(names: Names, tensor: Tensor) -> Tensor:
    """The tensor in the type that it has."""
    return tensor


@dataclass(frozen=True)
class Cut:
    """A dimension that the ranks of a group have equal pieces of, in their order; the last ones may have less.

    Args:
        group: the ranks.
        ranks: how many.
        dim: the dimension.
        size: of it, before the cut.
    """

    group: dist.ProcessGroup
    ranks: int
    dim: int
    size: int

    @property
    def chunk(self) -> int:
        """What a rank has of the dimension at most."""
        return -(-self.size // self.ranks)

    def put_together(self, pieces: Tensor) -> Tensor:
        """[ranks, ...] -> the tensor before the cut."""
        joined = pieces.flatten(0, 1) if self.dim == 0 else torch.cat(pieces.unbind(), self.dim)
        return joined.narrow(self.dim, 0, self.size).contiguous()


@dataclass(frozen=True, eq=False)
class Part:
    """What this process has of a tensor.

    Args:
        names: of the tensor.
        local: the part, in the type that is wanted.
        shape: of the whole tensor.
        cuts: that were made, in their order; the last one is undone first.
    """

    names: Names
    local: Tensor
    shape: torch.Size
    cuts: tuple[Cut, ...] = ()

    @classmethod
    def of(cls, names: Names, tensor: Tensor, device: torch.device, cast: Casting = as_held) -> Part:
        """Of a DTensor, wherever its shards are, or of a tensor that every process has; what comes out is a copy."""
        cuts = cuts_of(tensor) if isinstance(tensor, DTensor) else ()
        if cuts is None:
            moved: Any = cast(names, tensor.to(device))
            return cls(names, moved.full_tensor(), tensor.shape)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return cls(names, cast(names, local.to(device, copy=not cuts)), tensor.shape, cuts)

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.local.element_size()

    def to_send(self) -> Tensor:
        """[bytes] of the part, filled up to those that the first rank of the last cut's group has."""
        cut, missing = self.cuts[-1], [0, 0] * self.local.ndim
        missing[-1 - 2 * cut.dim] = cut.chunk - self.local.shape[cut.dim]
        padded = torch.nn.functional.pad(self.local, missing) if any(missing) else self.local
        return padded.contiguous().view(-1).view(torch.uint8)

    def received(self, sent: Tensor) -> Part:
        """The part before the last cut, from the bytes [ranks, bytes] of all ranks."""
        cut = self.cuts[-1]
        chunk = [cut.chunk if dim == cut.dim else size for dim, size in enumerate(self.local.shape)]
        apart = sent.contiguous() if sent.numel() else sent.new_empty(0)  # nothing is contiguous wherever it begins
        pieces = apart.view(-1).view(self.local.dtype).view(cut.ranks, *chunk)
        return replace(self, local=cut.put_together(pieces), cuts=self.cuts[:-1])


def cuts_of(tensor: DTensor) -> tuple[Cut, ...] | None:
    """The cuts of a DTensor in the order in which they were made; None where they are of another kind."""
    mesh, sizes = tensor.device_mesh, list(tensor.shape)
    cut = [(number, p) for number, p in enumerate(tensor.placements) if mesh.size(number) > 1 and not p.is_replicate()]
    plain = [(number, place) for number, place in cut if isinstance(place, Shard)]
    later = [(number, place) for number, place in cut if isinstance(place, _StridedShard)]
    if len(plain) + len(later) != len(cut):
        return None
    for number, strided in later:  # a dimension of the mesh that cuts what those behind it have left
        behind = math.prod(mesh.size(other) for other, p in plain if p.dim == strided.dim and other > number)
        if strided.split_factor != behind or behind == 1 or sum(p.dim == strided.dim for _, p in later) > 1:
            return None
    dims = [(number, place.dim % tensor.ndim) for number, place in plain]
    dims += [(number, place.dim % tensor.ndim) for number, place in later]
    cuts = list[Cut]()
    # Cuts of different dimensions may change places: fully_shard's, of rows, comes last, and is undone for all at once.
    for number, dim in sorted(dims, key=lambda cut: -cut[1]):
        cuts.append(Cut(mesh.get_group(number), mesh.size(number), dim, sizes[dim]))
        sizes[dim] = max(0, min(cuts[-1].chunk, sizes[dim] - cuts[-1].chunk * mesh.get_local_rank(number)))
    return tuple(cuts)


def gathered(parts: Iterable[Part], limit: int = BUCKET_BYTES) -> Iterator[tuple[Names, Tensor]]:
    """(names, whole tensor) of each part in their order; every rank that has parts of them calls it.

    Args:
        parts: taken as they are needed: those of a bucket are there at a time.
        limit: bytes of the tensors of a bucket; a larger one has its own.
    """
    for bucket in in_buckets(parts, lambda part: part.nbytes, limit):
        _undo_cuts(bucket)
        bucket.reverse()
        while bucket:
            yield _taken(bucket.pop())


def _taken(part: Part) -> tuple[Names, Tensor]:
    return part.names, part.local.view(part.shape)


def in_buckets(
    items: Iterable[Item], bytes_of: Callable[[Item], int], limit: int = BUCKET_BYTES
) -> Iterator[list[Item]]:
    """Neighbours together as long as they have no more than ``limit`` bytes."""
    bucket, filled = list[Item](), 0
    for item in items:
        size = bytes_of(item)
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    if bucket:
        yield bucket


def _undo_cuts(parts: list[Part]) -> None:
    """Make them whole, in place; one collective for the cuts of all parts that the same ranks have pieces of."""
    while cut := next((part.cuts[-1] for part in parts if part.cuts), None):
        group = cut.group
        chosen = [number for number, part in enumerate(parts) if part.cuts and part.cuts[-1].group is group]
        sent = [parts[number].to_send() for number in chosen]
        mine = torch.cat(sent) if len(sent) > 1 else sent[0]
        everyone = mine.new_empty(cut.ranks, len(mine))
        dist.all_gather_single(everyone.view(-1), mine, group=group)
        for number, piece in zip(chosen, everyone.split([len(s) for s in sent], 1), strict=True):
            parts[number] = parts[number].received(piece)


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """[n] bytes of tensors, one behind the other."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def from_bytes(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """The tensors again, each with the type and shape of its like."""
    parts = flat.split([like.nbytes for like in likes])
    # A part begins anywhere, and a view in another type only at a multiple of its bytes.
    moved = [part.clone() if len(parts) > 1 else part for part in parts]
    return [part.view(like.dtype).view(like.shape) for part, like in zip(moved, likes, strict=True)]
