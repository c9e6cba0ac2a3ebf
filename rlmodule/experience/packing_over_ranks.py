"""Packing the mini-batches of an iteration takes turns over the ranks where there are many samples.

Every rank could pack all of them, with the same result, and does so where that is quicker than telling. Leaves out how
a mini-batch is packed (``batching/``): this is handed jobs and tells what came of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlmodule.batching.packing import Packing, PackingJob, pack_in_turn
from rlmodule.batching.partition import Ints
from rlmodule.core.contract import Collectives
from rlmodule.core.layout import Layout

# Packing so many samples takes about 60 ms, telling of them about 1 ms and the wait for the last of the ranks.
MANY_SAMPLES = 65_536


@dataclass(frozen=True)
class PackingOverRanks:
    """Rank i of n packs the mini-batches i, i + n, ..., and all ranks learn the packing of each.

    Args:
        layout: of this rank.
        collectives: of the ranks that hold rows.
        many_samples: of all mini-batches together, below which every rank packs them all and nothing is sent.
    """

    layout: Layout
    collectives: Collectives
    many_samples: int = field(default=MANY_SAMPLES)

    def __call__(self, jobs: Sequence[PackingJob]) -> Iterable[Packing]:
        """The packing of every mini-batch; for ``plan_batch``, which all ranks call alike."""
        ranks = self.layout.dp_sp_size
        if min(ranks, len(jobs)) == 1 or sum(job.num_samples for job in jobs) < self.many_samples:
            return pack_in_turn(jobs)
        mine = {number: jobs[number].pack() for number in range(self.layout.dp_sp_rank, len(jobs), ranks)}
        shapes = np.zeros((len(jobs), 2), np.int64)
        for number, packing in mine.items():
            shapes[number] = packing.num_steps, packing.widths is not None
        shapes = self._sum(shapes)
        cells = [job.num_samples for job in jobs]
        widths = (shapes[:, 0] * shapes[:, 1] * self.layout.dp_size).tolist()
        ends = np.cumsum([count for sizes in zip(cells, widths, strict=True) for count in sizes])
        told = np.zeros(ends[-1], np.int32)
        places = np.split(told, ends[:-1])  # views: cells and widths of one mini-batch after the other
        for number, packing in mine.items():
            places[2 * number][:] = packing.cell
            places[2 * number + 1][:] = () if packing.widths is None else packing.widths.ravel()
        places = np.split(self._sum(told), ends[:-1])
        return (
            self._packing(places[2 * number], places[2 * number + 1], int(steps), bool(is_shared))
            for number, (steps, is_shared) in enumerate(shapes)
        )

    def _sum(self, numbers: Ints) -> Ints:
        """What the one rank wrote that has something to say at a place; the others wrote 0."""
        summed: Ints = self.collectives.sum_numbers(torch.from_numpy(numbers)).numpy()
        return summed

    def _packing(self, cell: Ints, widths: Ints, num_steps: int, is_shared: bool) -> Packing:
        of_ranks = widths.reshape(num_steps, -1).astype(np.int64) if is_shared else None
        return Packing(cell.astype(np.int64), num_steps, self.layout.dp_size, of_ranks)
