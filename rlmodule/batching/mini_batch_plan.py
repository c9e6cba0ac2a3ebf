"""The plan of one optimizer step over all data ranks, in columns: a million samples are a few arrays.

How it is made is in ``plan.py``; what of it a rank computes is in ``sampler.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats
from rlmodule.core.layout import place_of
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.core.types import SampleMeta, StepTotals

Positions = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class MiniBatchPlan:
    """One optimizer step over all data ranks.

    Args:
        samples: [n] int32 positions of the samples, one micro-batch after the other: by rank and micro-step, of ranks
            that share one where the first of them stands. In each, in the order of the data.
        sizes: [ranks, micro-steps] int64 samples of each micro-batch; 0 for a dummy micro-batch without loss, and for
            one that ranks share except at the first of them.
        totals: counts of the whole mini-batch, without padding samples.
        cost: [ranks, micro-steps] float64 FLOPs, or the unit of the given costs.
        widths: [ranks, micro-steps] int64 ranks that share the micro-batch, a power of two; None where none is shared.
            Each of them names its samples and computes one slice: that of its place (``place_of``).
        exchange_cost: part of ``cost`` that is paid for sharing, over all ranks.
        rank_tokens: [rank] tokens of each rank in this plan, without padding samples and dummy micro-batches; of a
            micro-batch that ranks share its part, which need not be whole.
        rank_tokens_unplanned: [rank] tokens of each rank if the mini-batch were split into equal consecutive slices.
        padding_tokens: tokens of padding samples and dummy micro-batches.
        num_skipped: samples that count in the totals but are not computed.
        shared_prompt_tokens: prompt tokens saved by computing the prompt of a group once.
        has_gradient: whether any sample can have a gradient.
        longest_row: tokens of the longest micro-batch of any rank, or slice of a shared one; shared prompts may make it
            shorter.
    """

    samples: Positions
    sizes: Ints
    totals: StepTotals
    cost: Floats
    rank_tokens: tuple[float, ...]
    rank_tokens_unplanned: tuple[int, ...]
    padding_tokens: int
    num_skipped: int = 0
    shared_prompt_tokens: int = 0
    has_gradient: bool = True
    longest_row: int = 0
    widths: Ints | None = None
    exchange_cost: float = 0.0

    def __post_init__(self) -> None:
        in_order = np.sort(self.samples)
        assert (in_order[1:] != in_order[:-1]).all(), (
            f"a plan holds each sample once, but has several times {_duplicates(self.positions)}"
        )
        assert int(self.sizes.sum()) == len(self.samples), f"{len(self.samples)} samples for {self.sizes.sum()} places"
        assert self.cost.shape == self.sizes.shape, "one cost per micro-batch"
        assert self.widths is None or self.widths.shape == self.sizes.shape, "one width per micro-batch"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MiniBatchPlan):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    @property
    def positions(self) -> list[int]:
        """Positions of all samples, by rank and micro-step; of ranks that share a micro-batch, the first one counts."""
        positions: list[int] = self.samples.tolist()
        return positions

    @cached_property
    def _ends(self) -> Ints:
        """[ranks * micro-steps] where each micro-batch ends in ``samples``."""
        ends: Ints = np.cumsum(self.sizes)
        return ends

    def width(self, rank: int, step: int) -> int:
        """Ranks that share the micro-batch of a rank."""
        return 1 if self.widths is None else int(self.widths[rank, step])

    def micro_batches_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """[micro-step] positions of the samples of a rank's micro-batches; empty for a dummy one without loss."""
        return tuple(self._micro_batches_of(rank))

    def _micro_batches_of(self, rank: int) -> Iterator[tuple[int, ...]]:
        for step in range(self.num_micro_steps):
            first = rank - place_of(rank, self.width(rank, step))
            end = int(self._ends[first * self.num_micro_steps + step])
            yield tuple(self.samples[end - int(self.sizes[first, step]) : end].tolist())

    @cached_property
    def micro_batches(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[rank][micro-step] the same of all ranks, as long tuples: for pictures and tests."""
        return tuple(self.micro_batches_of(rank) for rank in range(self.num_ranks))

    @property
    def shared_rows(self) -> int:
        """Micro-batches that several ranks share."""
        if self.widths is None:
            return 0
        is_first = np.arange(self.num_ranks)[:, None] % self.widths == 0
        return int((is_first & (self.widths > 1)).sum())

    def ranks_of(self, positions: Ints) -> tuple[Ints, Ints]:
        """[n] positions -> [n] first data rank that computes each (-1: not here), and [n] how many share it."""
        here = np.flatnonzero(np.isin(self.samples, positions))  # places in the plan of those that are in it
        if not len(here):
            return np.full_like(positions, -1), np.zeros_like(positions)
        cell = np.searchsorted(self._ends, here, side="right")
        width = np.ones_like(cell) if self.widths is None else self.widths.ravel()[cell]
        held = self.samples[here]
        by_position = np.argsort(held)
        place = np.searchsorted(held, positions, sorter=by_position)
        found = by_position[np.minimum(place, len(held) - 1)]
        is_here = held[found] == positions
        rank = cell // self.num_micro_steps
        return np.where(is_here, rank[found], -1), np.where(is_here, width[found], 0)

    @property
    def num_ranks(self) -> int:
        """Data ranks."""
        return len(self.sizes)

    @property
    def num_micro_steps(self) -> int:
        """Number of micro-steps, the same on every rank."""
        return int(self.sizes.shape[1])

    @property
    def lockstep_cost(self) -> float:
        """Sum over micro-steps of the most expensive micro-batch: all ranks wait for it."""
        return float(sum(self.cost.max(axis=0).tolist()))

    @property
    def lockstep_efficiency(self) -> float:
        """Mean cost of a rank over ``lockstep_cost``; 1.0 when no rank waits."""
        return self._mean_rank_cost / self.lockstep_cost if self.lockstep_cost else 1.0

    @property
    def max_over_mean(self) -> float:
        """Cost of the rank with most work over the mean of all ranks; 1.0 when they are equal."""
        return max(self._rank_cost) / self._mean_rank_cost if self._mean_rank_cost else 1.0

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics logged with the step; ``global_seqlen/*`` are tokens of one data rank."""
        before, after = self.rank_tokens_unplanned, self.rank_tokens
        metrics = {
            "global_seqlen/min": min(before),
            "global_seqlen/max": max(before),
            "global_seqlen/minmax_diff": max(before) - min(before),
            "global_seqlen/balanced_min": min(after),
            "global_seqlen/balanced_max": max(after),
            "global_seqlen/mean": sum(after) / len(after),
            "balance/lockstep_efficiency": self.lockstep_efficiency,
            "balance/max_over_mean": self.max_over_mean,
            "balance/num_micro_steps": self.num_micro_steps,
            "balance/padding_tokens": self.padding_tokens,
            "balance/skipped_samples": self.num_skipped,
            "balance/shared_prompt_tokens": self.shared_prompt_tokens,
            "balance/shared_rows": self.shared_rows,
            "balance/peak_tokens": self.longest_row,
        }
        return {name: float(value) for name, value in metrics.items()}

    def recounted(self, metas: Sequence[SampleMeta]) -> MiniBatchPlan:
        """The same plan with totals of loss tokens that changed after it was made (rejected tokens).

        Args:
            metas: all samples as they are now; positions after the last one are padding samples.
        """
        members = SampleMetas.of(metas).take(self.samples[self.samples < len(metas)])
        return replace(
            self, totals=totals_of(members, self.num_ranks, self.totals.sp_size), has_gradient=has_gradient(members)
        )

    @cached_property
    def _rank_cost(self) -> list[float]:
        """[rank] cost of each, micro-step after micro-step, so that it rounds as a loop over them."""
        costs: list[float] = np.add.accumulate(self.cost, axis=1)[:, -1].tolist()
        return costs

    @property
    def _mean_rank_cost(self) -> float:
        return (sum(self._rank_cost) - self.exchange_cost) / self.num_ranks


@dataclass(frozen=True, eq=False)
class GroupTokens(Mapping[int, int]):
    """Loss tokens by group id, as two columns.

    Args:
        ids: [G] int64 group ids, ascending.
        tokens: [G] int64 loss tokens of each.
    """

    ids: Ints
    tokens: Ints

    def __getitem__(self, group_id: int) -> int:
        place = int(np.searchsorted(self.ids, group_id))
        if place == len(self.ids) or self.ids[place] != group_id:
            raise KeyError(group_id)
        return int(self.tokens[place])

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return repr(dict(self))


def totals_of(members: SampleMetas, dp_size: int, sp_size: int) -> StepTotals:
    """Counts of the samples of a mini-batch."""
    live = np.flatnonzero(members.counts)
    groups, group = np.unique(members.group_id[live], return_inverse=True)
    tokens = np.bincount(group, weights=members.loss_tokens[live], minlength=len(groups)).astype(np.int64)
    return StepTotals(
        tokens=int(tokens.sum()),
        sequences=len(live),
        dp_size=dp_size,
        sp_size=sp_size,
        group_tokens=GroupTokens(groups, tokens),
    )


def has_gradient(members: SampleMetas) -> bool:
    """Whether any sample of a mini-batch can have a gradient."""
    return bool((members.has_gradient & ~members.is_padding).any())


def _duplicates(positions: Sequence[int]) -> list[int]:
    return sorted(position for position, times in Counter(positions).items() if times > 1)
