"""Ulysses sequence parallelism (arXiv:2309.14509): rows are cut over ranks, heads are exchanged around attention.

A rank holds T/sp tokens of all heads; attention needs T tokens of some heads. One all-to-all goes there, its mirror
back. The object has no state and is no global: the model hands it to its attention as a keyword. Leaves out the
attention itself (``rlmodule/ops/attention.py``), how a row is cut (``rlmodule/batching/collate.py``), and which ranks
form a group (``mesh.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from strategies.parts.collectives import GroupCollectives

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


@dataclass(frozen=True, eq=False)
class Ulysses:
    """The sequence-parallel group of one rank; implements ``SequenceRanks``.

    Args:
        group: its process group.
        collectives: of the same group, for small objects.
        size, rank: of the group, and of this process in it.
    """

    group: dist.ProcessGroup
    collectives: GroupCollectives
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device) -> Ulysses | None:
        """The group of this process, None where rows are not cut; ``device`` is that of ``GroupCollectives``."""
        if group is None or dist.get_world_size(group) == 1:
            return None
        return cls(group, GroupCollectives(device, group), dist.get_world_size(group), dist.get_rank(group))

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads, T/sp, D] -> [1, heads/sp, T, D]: one all-to-all for queries, keys and values.

        Where there are fewer key/value heads than ranks, each is repeated for the ranks whose queries read it.
        """
        parts = [self._for_ranks(x) for x in (query, key, value)]  # [sp, heads/sp, T/sp, D] each
        sizes = [part[0].numel() for part in parts]
        arrived = _mirrored(_all_to_all, torch.cat([part.flatten(1) for part in parts], dim=1), self.group)
        pieces = zip(torch.split(arrived, sizes, dim=1), parts, strict=True)
        # The first axis is now the sender, which is the slice of the row.
        q, k, v = (piece.view(part.shape).transpose(0, 1).flatten(1, 2).unsqueeze(0) for piece, part in pieces)
        return q.to(query.dtype), k.to(key.dtype), v.to(value.dtype)

    def gather_heads(self, out: Tensor) -> Tensor:
        """[1, T, heads/sp, D] -> [1, T/sp, heads, D]."""
        by_slice = out[0].reshape(self.size, -1, *out.shape[2:])  # [sp, T/sp, heads/sp, D]
        by_heads = _mirrored(_all_to_all, by_slice, self.group)
        return by_heads.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def sum_over_slices(self, value: Tensor) -> Tensor:
        """Sum over the ranks. Every rank's loss may depend on it, so backward sums over the ranks as well."""
        return _mirrored(_all_reduce, value, self.group)

    def gather_slices(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """[n] of this slice, for each micro-batch -> [N] of the whole rows, in the order of the row."""
        everyone = self.collectives.gather_objects(list(parts))
        return [torch.cat(slices) for slices in zip(*everyone, strict=True)]

    def _for_ranks(self, x: Tensor) -> Tensor:
        heads = x.shape[1]
        if heads < self.size:
            x = x.repeat_interleave(self.size // heads, dim=1)
        return x[0].reshape(self.size, -1, *x.shape[2:])


def _mirrored(collective: Collective, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A collective, differentiable."""
    result: Tensor = _Mirrored.apply(collective, x, group)  # type: ignore[no-untyped-call]
    return result


class _Mirrored(torch.autograd.Function):
    """A collective whose backward is the same collective, applied to the gradient."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.collective, ctx.group = collective, group
        return collective(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.collective(grad, ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``x[r]`` to rank r; place r of the result is what rank r sent here."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
