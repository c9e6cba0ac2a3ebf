"""Ulysses sequence parallelism (arXiv:2309.14509): rows are cut over ranks, heads are exchanged around attention.

A rank holds T/n tokens of all heads; attention needs T tokens of some heads. One all-to-all goes there,
its mirror back. Leaves out the attention itself (``rlmodule/ops/attention.py``), how a row
is cut (``rlmodule/core/slices.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.parts.mirrored import all_to_all, exchanged


@dataclass(frozen=True, eq=False)
class Ulysses:
    """The ranks that exchange heads, n of them.

    Args:
        group: their process group.
    """

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size(self.group)

    def scatter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads, T/n, D] -> [1, heads/n, T, D]: one all-to-all for queries, keys and values.

        Where there are fewer key/value heads than ranks, each is repeated for the ranks whose queries read it.
        """
        parts = [self._for_ranks(x) for x in (query, key, value)]  # [n, heads/n, T/n, D] each
        sizes = [part[0].numel() for part in parts]
        leaving = torch.cat([part.flatten(1) for part in parts], dim=1)
        arrived = exchanged(all_to_all, all_to_all, leaving, self.group)
        pieces = zip(torch.split(arrived, sizes, dim=1), parts, strict=True)
        # The first axis is now the sender, which is the slice of the row.
        q, k, v = (piece.view(part.shape).transpose(0, 1).flatten(1, 2).unsqueeze(0) for piece, part in pieces)
        return q.to(query.dtype), k.to(key.dtype), v.to(value.dtype)

    def gather(self, out: Tensor) -> Tensor:
        """[1, T, heads/n, D] -> [1, T/n, heads, D]."""
        by_slice = out[0].reshape(self.size, -1, *out.shape[2:])  # [n, T/n, heads/n, D]
        by_heads = exchanged(all_to_all, all_to_all, by_slice, self.group)
        return by_heads.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def own(self, values: Tensor) -> Tensor:
        """[heads, ...] -> [heads/n, ...]: those of this rank's heads."""
        return values.chunk(self.size)[dist.get_rank(self.group)]

    def _for_ranks(self, x: Tensor) -> Tensor:
        heads = x.shape[1]
        if heads < self.size:
            x = x.repeat_interleave(self.size // heads, dim=1)
        return x[0].reshape(self.size, -1, *x.shape[2:])
