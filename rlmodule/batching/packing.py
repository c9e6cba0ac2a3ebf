"""The result of a planner: the micro-step and the rank of every sample of a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats


@dataclass(frozen=True, eq=False)
class Packing:
    """Assignment of samples to cells; a cell is one micro-batch of one data rank.

    Args:
        cell: [n] int64 cell of each sample, ``micro-step * dp_size + rank``.
        num_steps: micro-steps, including empty ones.
        dp_size: data ranks.
    """

    cell: Ints
    num_steps: int
    dp_size: int

    def __post_init__(self) -> None:
        assert len(self.cell) == 0 or 0 <= self.cell.min() <= self.cell.max() < self.num_cells, (
            "a sample has a cell that does not exist"
        )

    @property
    def num_cells(self) -> int:
        """Micro-batches of all ranks together."""
        return self.num_steps * self.dp_size

    def sums(self, values: Floats | Ints) -> Floats:
        """[n] value of each sample -> [num_steps, dp_size] float64 sum over each micro-batch."""
        total = np.bincount(self.cell, weights=values, minlength=self.num_cells).astype(np.float64, copy=False)
        return total.reshape(self.num_steps, self.dp_size)

    def in_order(self, steps: Ints) -> Packing:
        """Reorder micro-steps: ``steps[i]`` becomes micro-step i."""
        new = np.empty(self.num_steps, np.int64)
        new[steps] = np.arange(self.num_steps)
        step, place = np.divmod(self.cell, self.dp_size)
        return replace(self, cell=new[step] * self.dp_size + place)

    def with_balanced_ranks(self, cost: Floats) -> Packing:
        """Permute the cells of each micro-step: the most expensive one goes to the rank with the least work so far."""
        work = np.zeros(self.dp_size)
        rank_of = np.empty((self.num_steps, self.dp_size), np.int64)  # [step, cell of the step] -> rank
        for sums, ranks in zip(self.sums(cost), rank_of, strict=True):
            most_expensive_first = np.argsort(-sums, kind="stable")
            least_work_first = np.argsort(work, kind="stable")
            ranks[most_expensive_first] = least_work_first
            work[least_work_first] += sums[most_expensive_first]
        step, place = np.divmod(self.cell, self.dp_size)
        return replace(self, cell=step * self.dp_size + rank_of[step, place])

    def with_steps_multiple_of(self, multiple: int) -> Packing:
        """Add empty micro-steps at the end."""
        return replace(self, num_steps=self.num_steps + -self.num_steps % multiple)

    def members(self, names: Ints) -> list[list[tuple[int, ...]]]:
        """[n] ascending name of each sample -> [step][rank] ascending names of each micro-batch."""
        by_cell = np.argsort(self.cell, kind="stable")
        ends = np.cumsum(np.bincount(self.cell, minlength=self.num_cells)).tolist()
        listed = names[by_cell].tolist()
        cells = [tuple(listed[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        return [cells[start : start + self.dp_size] for start in range(0, self.num_cells, self.dp_size)]


def least_steps(wanted: int, num_samples: int, dp_size: int) -> int:
    """``wanted`` micro-steps, or as many as no rank needs a dummy for all of its part of one."""
    return max(1, min(wanted, -(-num_samples // dp_size)))


def packing_of(cells: list[list[list[int]]]) -> Packing:
    """Packing from lists [step][rank] of samples; every micro-step has one (possibly empty) list per rank."""
    dp_size = len(cells[0])
    flat = [samples for step in cells for samples in step]
    cell = np.empty(sum(map(len, flat)), np.int64)
    for number, samples in enumerate(flat):
        cell[samples] = number
    return Packing(cell, len(cells), dp_size)
