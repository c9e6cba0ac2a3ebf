"""Implementations of ``Collectives``: rows of numbers, small objects, and samples on their way to where they train."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


@dataclass(frozen=True)
class LocalCollectives:
    """The collectives of one rank, which send nothing."""

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[K, C] -> [1, K, C]."""
        return rows[None]

    def gather_objects(self, item: Item) -> list[Item]:
        """The item alone."""
        return [item]

    def sum_numbers(self, numbers: Tensor) -> Tensor:
        """The numbers themselves."""
        return numbers

    def exchange(self, outgoing: Sequence[Item]) -> list[Item]:
        """The one item."""
        return list(outgoing)

    def broadcast(self, item: Item) -> Item:
        """The item itself."""
        return item


@dataclass(frozen=True)
class GroupCollectives:
    """The collectives of one process group.

    Args:
        device: the device of tensors that its backend sends (gloo: cpu, nccl: the GPU).
        group: the ranks in the order of ``Layout.dp_sp_rank``; None for the world.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size(self.group)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[K, C] float64, K the same on every rank -> [ranks, K, C] on the CPU; one collective."""
        mine = rows.to(self.device).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts).cpu()

    def gather_objects(self, item: Item) -> list[Item]:
        """One picklable object per rank -> the objects of all ranks, in rank order.

        Two collectives: the sizes, then the bytes, filled up to those of the longest.
        """
        mine = _pickled(item)
        sizes = self._gather(torch.tensor([len(mine)])).tolist()
        longest = max(sizes)
        everyone = self._gather(torch.nn.functional.pad(mine, (0, longest - len(mine))))
        return unpickled(everyone, sizes)

    def sum_numbers(self, numbers: Tensor) -> Tensor:
        """Integers, of one shape on all ranks -> their sums over ranks, on the CPU. One collective; overwrites."""
        summed = numbers.to(self.device)
        dist.all_reduce(summed, group=self.group)
        return summed.cpu()

    def _gather(self, mine: Tensor) -> Tensor:
        """[n] of each rank -> [ranks * n] on the CPU; one all-gather."""
        everyone = torch.empty(self.size * len(mine), dtype=mine.dtype, device=self.device)
        dist.all_gather(list(everyone.split(len(mine))), mine.to(self.device), group=self.group)
        return everyone.cpu()

    def exchange(self, outgoing: Sequence[Item]) -> list[Item]:
        """Send ``outgoing[r]`` to rank r; returns what every rank sent to this one, in rank order."""
        return self._exchange([_pickled(item) for item in outgoing])

    def _exchange(self, payloads: Sequence[Tensor]) -> list[Any]:
        """Two collectives: the sizes, then the bytes."""
        assert len(payloads) == self.size, f"{len(payloads)} payloads for {self.size} ranks"
        leaving = torch.tensor([len(p) for p in payloads], device=self.device)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self.group)
        sizes = arriving.tolist()
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        bytes_out = torch.cat(list(payloads)).to(self.device)
        dist.all_to_all_single(buffer, bytes_out, sizes, leaving.tolist(), group=self.group)
        arrived = torch.split(buffer.cpu(), sizes)
        return [pickle.loads(part.numpy().tobytes()) for part in arrived]

    def broadcast(self, item: Item) -> Item:
        """Rank 0's picklable object, on every rank."""
        holder = [item]
        dist.broadcast_object_list(holder, group=self.group, group_src=0, device=self.device)
        return holder[0]


def _pickled(item: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(item, protocol=5)), dtype=torch.uint8)


def unpickled(everyone: Tensor, sizes: Sequence[int]) -> list[Any]:
    """[ranks * longest] uint8, the bytes of each rank filled up to those of the longest -> the object of each."""
    parts = everyone.split(len(everyone) // len(sizes))
    return [pickle.loads(part[:size].numpy()) for part, size in zip(parts, sizes, strict=True)]
