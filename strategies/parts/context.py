"""Context parallelism by gathered keys and values: the queries of a part of the row see the keys of all parts.

One all-gather per layer brings keys and values together, a reduce-scatter takes their gradients back to where they came
from. With grouped queries these are a fraction of the activations, and no number of heads limits how many ranks share a
row. The parts are balanced for causal work (``rlmodule/core/slices.py``). Leaves out a ring, in which a rank never has
the keys of a whole row and sends as many bytes in more messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.parts.mirrored import all_gather, exchanged, reduce_scatter


@dataclass(frozen=True, eq=False)
class Context:
    """The ranks with the same heads of different parts of a row.

    Args:
        group: their process group.
    """

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Parts of the row."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The part of this process."""
        return dist.get_rank(self.group)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[1, heads, n, D] of this part -> [1, heads, parts * n, D], one part after the other; both at once."""
        by_token = [x[0].transpose(0, 1) for x in (key, value)]  # [n, heads, D] each
        mine = torch.cat([x.flatten(1) for x in by_token], dim=1)
        everyone = exchanged(all_gather, reduce_scatter, mine, self.group)
        pieces = torch.split(everyone, [x[0].numel() for x in by_token], dim=1)
        k, v = (
            piece.unflatten(1, x.shape[1:]).transpose(0, 1).unsqueeze(0)
            for piece, x in zip(pieces, by_token, strict=True)
        )
        return k.to(key.dtype), v.to(value.dtype)
