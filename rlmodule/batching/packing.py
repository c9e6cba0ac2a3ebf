"""The result of a planner: the micro-step and the rank of every sample of a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Exchange, Floats


@dataclass(frozen=True, eq=False)
class Packing:
    """Assignment of samples to cells; a cell is one micro-batch of one data rank, or of neighbours that share it.

    Args:
        cell: [n] int64 cell of each sample, ``micro-step * dp_size + rank``; the first of the ranks that share it.
        num_steps: micro-steps, including empty ones.
        dp_size: data ranks.
        widths: [num_steps, dp_size] int64, ranks that share the cell that each of them computes: a power of two whose
            first rank is a multiple of it. None where each has its own.
    """

    cell: Ints
    num_steps: int
    dp_size: int
    widths: Ints | None = None

    def __post_init__(self) -> None:
        assert len(self.cell) == 0 or 0 <= self.cell.min() <= self.cell.max() < self.num_cells, (
            "a sample has a cell that does not exist"
        )
        if self.widths is not None:
            first = self.first_ranks
            assert (self.widths == np.take_along_axis(self.widths, first, axis=1)).all(), "ranks of a cell disagree"
            assert (first.ravel()[self.cell] == self.cell % self.dp_size).all(), "a sample is in the middle of a cell"

    @property
    def num_cells(self) -> int:
        """Micro-batches of all ranks together; one that is shared counts as often as it has ranks."""
        return self.num_steps * self.dp_size

    @property
    def width(self) -> Ints:
        """[num_steps, dp_size] ranks that share the cell of each."""
        return np.ones((self.num_steps, self.dp_size), np.int64) if self.widths is None else self.widths

    @property
    def first_ranks(self) -> Ints:
        """[num_steps, dp_size] first of the ranks that share the cell of each."""
        rank = np.arange(self.dp_size)
        return rank - rank % self.width

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """[num_steps, dp_size] whether a rank is the first of those that share its cell."""
        return np.equal(self.first_ranks, np.arange(self.dp_size))

    def sums(self, values: Floats | Ints) -> Floats:
        """[n] value of each sample -> [num_steps, dp_size] float64 sum over the micro-batch of each rank."""
        total = np.bincount(self.cell, weights=values, minlength=self.num_cells).astype(np.float64, copy=False)
        by_step = total.reshape(self.num_steps, self.dp_size)
        return by_step if self.widths is None else np.take_along_axis(by_step, self.first_ranks, axis=1)

    def heights(self, cost: Floats, exchange: Exchange) -> Floats:
        """[n] cost of each sample -> [num_steps, dp_size] cost of each rank, of a shared micro-batch its part."""
        sums = self.sums(cost)
        return sums if self.widths is None else sums * exchange.share(self.widths)

    def in_order(self, steps: Ints) -> Packing:
        """Reorder micro-steps: ``steps[i]`` becomes micro-step i."""
        new = np.empty(self.num_steps, np.int64)
        new[steps] = np.arange(self.num_steps)
        step, place = np.divmod(self.cell, self.dp_size)
        widths = None if self.widths is None else self.widths[steps]
        return replace(self, cell=new[step] * self.dp_size + place, widths=widths)

    def with_balanced_ranks(self, cost: Floats) -> Packing:
        """Permute the cells of each micro-step: the most expensive one goes to the ranks with the least work so far.

        Wider cells choose first, so that every cell stays aligned to its width.
        """
        work = np.zeros(self.dp_size)
        rank_of = np.empty((self.num_steps, self.dp_size), np.int64)  # [step, first rank] -> new first rank
        if self.widths is None:
            for sums, new_rank in zip(self.sums(cost), rank_of, strict=True):
                most_expensive_first, least_work_first = (-sums).argsort(kind="stable"), work.argsort(kind="stable")
                new_rank[most_expensive_first] = least_work_first
                work[least_work_first] += sums[most_expensive_first]
            return replace(self, cell=self.cell // self.dp_size * self.dp_size + rank_of.ravel()[self.cell])
        widths = np.empty_like(rank_of)
        for step, (sums, width_of) in enumerate(zip(self.sums(cost), self.widths, strict=True)):
            widths[step] = 0
            for width in np.unique(width_of)[::-1].tolist():
                cells = np.flatnonzero((width_of == width) & (np.arange(self.dp_size) % width == 0))
                most_expensive_first = cells[np.argsort(-sums[cells], kind="stable")]
                places = np.arange(0, self.dp_size - width + 1, width)
                places = places[widths[step, places] == 0]
                least_work_first = np.argsort(np.add.reduce(work[_ranks(places, width)], axis=1), kind="stable")
                chosen = places[least_work_first[: len(cells)]]
                rank_of[step, most_expensive_first] = chosen
                widths[step, _ranks(chosen, width)] = width
                work[_ranks(chosen, width)] += sums[most_expensive_first, None] / width
        step_of, place = np.divmod(self.cell, self.dp_size)
        cell = step_of * self.dp_size + rank_of[step_of, place]
        return replace(self, cell=cell, widths=widths)

    def with_steps_multiple_of(self, multiple: int) -> Packing:
        """Add empty micro-steps at the end."""
        missing = -self.num_steps % multiple
        if self.widths is None or missing == 0:
            return replace(self, num_steps=self.num_steps + missing)
        widths = np.concatenate([self.widths, np.ones((missing, self.dp_size), np.int64)])
        return replace(self, num_steps=self.num_steps + missing, widths=widths)

    def by_rank(self) -> tuple[Ints, Ints]:
        """[n] the samples by rank and micro-step, ascending in each cell; [dp_size, num_steps] their number in each.

        A cell that ranks share counts where the first of them stands.
        """
        step, rank = np.divmod(self.cell, self.dp_size)
        cell = rank * self.num_steps + step
        sizes = np.bincount(cell, minlength=self.num_cells).reshape(self.dp_size, self.num_steps)
        count = max(len(cell), 1)
        # Sorting cell and sample as one number is several times as fast as a stable argsort.
        return np.sort(cell * count + np.arange(len(cell))) % count, sizes


@dataclass(frozen=True, eq=False)
class PackingJob:
    """A mini-batch that is to be packed.

    Args:
        num_samples: of it.
        pack: packs it, with the same result in every process.
    """

    num_samples: int
    pack: Callable[[], Packing]


PackAll = Callable[[Sequence[PackingJob]], Iterable[Packing]]


def pack_in_turn(jobs: Sequence[PackingJob]) -> Iterator[Packing]:
    """The packing of every mini-batch, made here when it is asked for."""
    return (job.pack() for job in jobs)


def _ranks(first: Ints, width: int) -> Ints:
    """[C] first ranks of cells -> [C, width] all their ranks."""
    return first[:, None] + np.arange(width)


def least_steps(wanted: int, num_samples: int, dp_size: int) -> int:
    """``wanted`` micro-steps, but no more than there are when every micro-batch has one sample."""
    return max(1, min(wanted, -(-num_samples // dp_size)))


def fewest_cells(length: Ints, token_budget: int) -> int:
    """Lower bound on the micro-batches that hold samples of [n] tokens, each within the budget; at least 1.

    One bound is all their tokens over the budget. Another one is that of the long samples: of the i + 1 longest, a
    micro-batch holds no more than it would of samples that are all as long as the shortest of these.
    """
    longest_first = np.sort(length)[::-1].astype(np.int64)  # a budget need not be an int32
    by_count = -(-np.arange(1, len(length) + 1) // (token_budget // longest_first))
    return max(1, -(-int(longest_first.sum()) // token_budget), int(by_count.max(initial=0)))


def packing_of(cells: list[list[list[int]]]) -> Packing:
    """Packing from lists [step][rank] of samples; every micro-step has one (possibly empty) list per rank."""
    dp_size = len(cells[0])
    flat = [samples for step in cells for samples in step]
    cell = np.empty(sum(map(len, flat)), np.int64)
    for number, samples in enumerate(flat):
        cell[samples] = number
    return Packing(cell, len(cells), dp_size)
