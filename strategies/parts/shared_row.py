"""The ranks that share a packed row, as models and losses see them: a number of slices, whatever is exchanged for them.

Ranks of a part exchange heads (``ulysses.py``); ranks with the same heads gather keys and values (``context.py``). The
object has no state and is no global: the model hands it to its attention as a keyword. Which ranks form a group is said
in ``mesh.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rlmodule.core.layout import Layout
from strategies.parts.collectives import GroupCollectives
from strategies.parts.context import Context
from strategies.parts.mesh import Mesh
from strategies.parts.mirrored import all_reduce, exchanged, uneven_all_to_all
from strategies.parts.ulysses import Ulysses


@dataclass(frozen=True, eq=False)
class SharedRow:
    """The ranks that each hold a slice of one row; implements ``SequenceRanks``.

    Args:
        group: all of them.
        collectives: of the same group, for small objects.
        ulysses: those of the same part; None where each part is one slice.
        context: those with the same heads; None where there is one part.
    """

    group: dist.ProcessGroup
    collectives: GroupCollectives
    ulysses: Ulysses | None
    context: Context | None

    @classmethod
    def of(cls, mesh: Mesh, device: torch.device) -> SharedRow | None:
        """That of this process, None where rows are not cut; ``device`` is that of ``GroupCollectives``."""
        group, (heads, parts) = mesh.sequence_group, mesh.row_groups
        if group is None:
            return None
        ulysses, context = None if heads is None else Ulysses(heads), None if parts is None else Context(parts)
        return cls(group, GroupCollectives(device, group), ulysses, context)

    @classmethod
    def by_width(cls, mesh: Mesh, device: torch.device, layout: Layout) -> dict[int, SharedRow]:
        """Those of this process, by the ranks of each: of ``sp_size``, or of every width up to ``max_sp_size``.

        Every process calls it, and makes the same groups in the same order. ``layout`` is that of the mesh, and says
        how rows are shared by plan.
        """
        always = cls.of(mesh, device)
        if always is not None:
            return {always.size: always}
        groups = mesh.neighbours(layout.max_sp_size)
        heads = {width: Ulysses(group) for width, group in groups.items() if width <= layout.max_heads_size}
        parts = {width: Context(group) for width, group in mesh.with_same_heads(layout).items()}
        return {
            width: cls(
                group, GroupCollectives(device, group), heads.get(width // layout.parts_of(width)), parts.get(width)
            )
            for width, group in groups.items()
        }

    @property
    def size(self) -> int:
        """Slices of the row."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The slice of this process."""
        return dist.get_rank(self.group)

    @property
    def num_parts(self) -> int:
        """Parts whose tokens attend on different ranks."""
        return 1 if self.context is None else self.context.size

    @property
    def part(self) -> int:
        """The part whose queries this process computes."""
        return 0 if self.context is None else self.context.rank

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange heads within the part, then gather keys and values over the parts."""
        if self.ulysses is not None:
            query, key, value = self.ulysses.scatter(query, key, value)
        if self.context is not None:
            key, value = self.context.gather(key, value)
        return query, key, value

    def gather_heads(self, out: Tensor) -> Tensor:
        """Exchange heads back."""
        return out if self.ulysses is None else self.ulysses.gather(out)

    def own_heads(self, values: Tensor) -> Tensor:
        """[heads, ...] -> those of this process's heads."""
        return values if self.ulysses is None else self.ulysses.own(values)

    def exchange(self, value: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Tokens to the ranks that compute them, or back."""
        there, back = partial(uneven_all_to_all, sent, received), partial(uneven_all_to_all, received, sent)
        return exchanged(there, back, value, self.group)

    def sum_over_slices(self, value: Tensor) -> Tensor:
        """Sum over the ranks. Every rank's loss may depend on it, so backward sums over the ranks as well."""
        return exchanged(all_reduce, all_reduce, value, self.group)

    def gather_slices(self, values: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
        """[n] of this slice, for each micro-batch -> [N] of the whole rows, in the order of the row."""
        everyone = self.collectives.gather_objects((list(values), [place.cpu() for place in places]))
        rows = []
        for number in range(len(values)):
            joined, order = (torch.cat([both[i][number] for both in everyone]) for i in (0, 1))
            rows.append(joined[order.argsort().to(joined.device)])
        return rows
