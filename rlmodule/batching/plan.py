"""The plan: which samples share an optimizer step, and the data rank and micro-step of each of them.

Every process computes the same plan from lengths alone, without a collective and without reading tokens. The planners
are in ``joint.py``, ``karmarkar_karp.py`` and ``fixed_size.py``; their input is in ``units.py``. Fetching and packing
the samples is done in ``sampler.py`` and ``collate.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress

import numpy as np

from rlmodule.batching.fixed_size import plan_fixed_size, plan_fixed_size_karmarkar_karp
from rlmodule.batching.joint import plan_joint
from rlmodule.batching.karmarkar_karp import plan_karmarkar_karp
from rlmodule.batching.limits import Limits
from rlmodule.batching.membership import blocks_in_order, blocks_of_one_mix, positions_of_blocks
from rlmodule.batching.packing import Packing
from rlmodule.batching.partition import Ints
from rlmodule.batching.shared_prompts import repeated_prompt_tokens
from rlmodule.batching.units import Packer, Units, units_of
from rlmodule.batching.wide import plan_wide
from rlmodule.batching.workload import Exchange, Floats, Numbers, Workload
from rlmodule.core.config import one_of
from rlmodule.core.layout import place_of, widths_of
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.core.types import SampleMeta, StepTotals

PLANNERS = ("joint", "joint_free", "karmarkar_karp")
ORDERS = ("largest_first", "balanced_ends")

# A dummy micro-batch is one prompt token and one response token without loss.
DUMMY_TOKENS = 2


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer step over all data ranks.

    Args:
        micro_batches: [rank][micro-step] ascending positions of samples; empty for a dummy micro-batch without loss.
        totals: counts of the whole mini-batch, without padding samples.
        cost: [rank][micro-step] FLOPs, or the unit of the given costs.
        widths: [rank][micro-step] ranks that share the micro-batch, a power of two; empty where none is shared. Each of
            them names its samples, in ``micro_batches``, and computes one slice: that of its place (``place_of``).
        exchange_cost: part of ``cost`` that is paid for sharing, over all ranks.
        rank_tokens: [rank] tokens of each rank in this plan, without padding samples and dummy micro-batches.
        rank_tokens_unplanned: [rank] tokens of each rank if the mini-batch were split into equal consecutive slices.
        padding_tokens: tokens of padding samples and dummy micro-batches.
        num_skipped: samples that count in the totals but are not computed.
        shared_prompt_tokens: prompt tokens saved by computing the prompt of a group once.
        has_gradient: whether any sample can have a gradient.
        longest_row: tokens of the longest micro-batch of any rank, or slice of a shared one; shared prompts may make it
            shorter.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    totals: StepTotals
    cost: tuple[tuple[float, ...], ...]
    rank_tokens: tuple[int, ...]
    rank_tokens_unplanned: tuple[int, ...]
    padding_tokens: int
    num_skipped: int = 0
    shared_prompt_tokens: int = 0
    has_gradient: bool = True
    longest_row: int = 0
    widths: tuple[tuple[int, ...], ...] = ()
    exchange_cost: float = 0.0

    def __post_init__(self) -> None:
        assert not self.widths or [len(rank) for rank in self.widths] == [len(rank) for rank in self.micro_batches], (
            "one width per micro-batch"
        )
        positions = self.position_array
        in_order = np.sort(positions)
        assert (in_order[1:] != in_order[:-1]).all(), (
            f"a plan holds each sample once, but has several times {_duplicates(positions.tolist())}"
        )
        steps = {len(rank) for rank in self.micro_batches}
        assert len(steps) == 1, f"every rank needs the same number of micro-steps, got {sorted(steps)}"
        assert [len(rank) for rank in self.cost] == [len(rank) for rank in self.micro_batches], (
            "one cost per micro-batch"
        )

    @property
    def positions(self) -> list[int]:
        """Positions of all samples, by rank and micro-step; of ranks that share a micro-batch, the first one counts."""
        positions: list[int] = self.position_array.tolist()
        return positions

    @property
    def position_array(self) -> Ints:
        """The same as an array."""
        return np.fromiter(chain.from_iterable(micro_batch for _, _, micro_batch in self._cells), np.int64)

    def width(self, rank: int, step: int) -> int:
        """Ranks that share the micro-batch of a rank."""
        return self.widths[rank][step] if self.widths else 1

    @property
    def shared_rows(self) -> int:
        """Micro-batches that several ranks share."""
        return sum(
            width > 1 and place_of(rank, width) == 0 for rank, steps in enumerate(self.widths) for width in steps
        )

    @property
    def _cells(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(first rank, number of ranks, samples) of each micro-batch, by rank and micro-step; shared ones once."""
        if not self.widths:
            return [(rank, 1, micro_batch) for rank, steps in enumerate(self.micro_batches) for micro_batch in steps]
        return [
            (rank, width, micro_batch)
            for rank, (steps, widths) in enumerate(zip(self.micro_batches, self.widths, strict=True))
            for micro_batch, width in zip(steps, widths, strict=True)
            if place_of(rank, width) == 0
        ]

    def ranks_of(self, positions: Ints) -> tuple[Ints, Ints]:
        """[n] positions -> [n] first data rank that computes each (-1: not here), and [n] how many share it."""
        cells, here = self._cells, self.position_array
        if not len(here):
            return np.full_like(positions, -1), np.zeros_like(positions)
        ranks = np.array([(rank, width) for rank, width, _ in cells], np.int64)
        first, width = np.repeat(ranks, [len(micro_batch) for _, _, micro_batch in cells], axis=0).T
        by_position = np.argsort(here, kind="stable")
        place = np.searchsorted(here, positions, sorter=by_position)
        found = by_position[np.minimum(place, len(here) - 1)]
        is_here = here[found] == positions
        return np.where(is_here, first[found], -1), np.where(is_here, width[found], 0)

    @property
    def num_micro_steps(self) -> int:
        """Number of micro-steps, the same on every rank."""
        return len(self.micro_batches[0])

    @property
    def lockstep_cost(self) -> float:
        """Sum over micro-steps of the most expensive micro-batch: all ranks wait for it."""
        return float(sum(max(step) for step in zip(*self.cost, strict=True)))

    @property
    def lockstep_efficiency(self) -> float:
        """Mean cost of a rank over ``lockstep_cost``; 1.0 when no rank waits."""
        return self._mean_rank_cost / self.lockstep_cost if self.lockstep_cost else 1.0

    @property
    def max_over_mean(self) -> float:
        """Cost of the rank with most work over the mean of all ranks; 1.0 when they are equal."""
        return max(map(sum, self.cost)) / self._mean_rank_cost if self._mean_rank_cost else 1.0

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
        positions = self.position_array
        members = SampleMetas.of(metas).take(positions[positions < len(metas)])
        return replace(
            self,
            totals=_totals(members, len(self.micro_batches), self.totals.sp_size),
            has_gradient=bool((members.has_gradient & ~members.is_padding).any()),
        )

    @property
    def _mean_rank_cost(self) -> float:
        return (sum(map(sum, self.cost)) - self.exchange_cost) / len(self.cost)


def plan_batch(
    metas: Sequence[SampleMeta],
    *,
    mini_batch_size: int,
    dp_size: int,
    token_budget: int,
    cost: Workload | Numbers | None = None,
    planner: str = "joint",
    seed: int = 0,
    sp_size: int = 1,
    micro_batch_size: int | None = None,
    order: str = "largest_first",
    multiple_of: int = 1,
    min_steps: int = 1,
    keep_groups: bool = False,
    share_prompts: bool = False,
    widest: int = 1,
) -> tuple[MiniBatchPlan, ...]:
    """Plan every optimizer step of an iteration.

    Args:
        metas: the samples, in the order of the data; plans hold positions into it.
        mini_batch_size: samples of one optimizer step; the last step may have fewer.
        dp_size: data ranks.
        token_budget: most tokens of one micro-batch (``max_token_len_per_gpu * sp_size``).
        cost: cost model, or [n] the cost of each sample, or None for the default cost model.
        planner: ``joint`` plans ranks and micro-steps together; ``joint_free`` also chooses which samples form a step;
            ``karmarkar_karp`` gives ranks equal counts, then plans each rank by itself.
        seed: seed of the membership of ``joint_free``; nothing else is random.
        sp_size: sequence-parallel ranks; only the totals need them.
        micro_batch_size: samples per micro-batch; if set, the token budget does not apply.
        order: ``largest_first``, or ``balanced_ends`` with small micro-steps at both ends, for pipelines.
        multiple_of: the number of micro-steps is raised to a multiple of this.
        min_steps: micro-steps at least, where there are samples for as many; with ``micro_batch_size`` not read.
        keep_groups: the samples of a group share a micro-batch; mini-batches and micro-batches then consist of whole
            groups, with at most ``mini_batch_size`` and ``micro_batch_size`` samples.
        share_prompts: a micro-batch computes the prompt of a group once. With ``keep_groups`` the tokens and the cost
            of the prompt are also planned once, which needs a Workload.
        widest: most neighbouring ranks that share a micro-batch, a power of two that divides ``dp_size``. Of a shared
            one, each has a slice of ``token_budget`` tokens at most. 1 shares none; the planner is then as without.

    Returns:
        One plan per optimizer step. Membership depends on the samples, their order and the seed, not on ``dp_size``.
        Skipped samples count in membership and totals; a step of skipped samples alone has dummy micro-batches only.

    Raises:
        ConfigError: an invalid setting, or a sample (or group, with ``keep_groups``) that is larger than a limit.
    """
    _check({"dp_size": dp_size, "multiple_of": multiple_of, "min_steps": min_steps}, planner, order)
    _check_widest(widest, dp_size, is_shared_by_tokens=micro_batch_size is None and planner != "karmarkar_karp")
    cost, metas = Workload() if cost is None else cost, SampleMetas.of(metas)
    limits = Limits(mini_batch_size, token_budget, micro_batch_size, sp_size, widest)
    limits.check_samples(metas)
    units = units_of(metas, cost, keep_groups=keep_groups, share_prompts=share_prompts)
    if keep_groups:
        limits.check_groups(metas, units)
    packer = _packer(planner, dp_size, limits, units.largest, cost, multiple_of, min_steps)
    exchange = cost.exchange if isinstance(cost, Workload) else Exchange()
    plans = []
    for block in _membership(units, planner, mini_batch_size, seed):
        computed = block[units.is_computed[block]]
        packing = units.pack(computed, packer) if len(computed) else Packing(computed, 1, dp_size)
        tokens = packing.sums(units.length[computed]) / packing.width
        assert micro_batch_size or tokens.max() <= token_budget, "a micro-batch exceeds the budget"
        packing = _order_steps(packing, packing.heights(units.cost[computed], exchange), order)
        packing = packing.with_steps_multiple_of(multiple_of)
        plans.append(_assemble(metas, block, units, packing, sp_size, share_prompts, exchange))
    planned = np.sort(np.concatenate([np.zeros(0, np.int64), *(plan.position_array for plan in plans)]))
    assert np.array_equal(planned, np.flatnonzero(units.is_computed)), "all plans hold each computed sample once"
    return tuple(plans)


def _check(sizes: Mapping[str, int], planner: str, order: str) -> None:
    assert min(sizes.values()) >= 1, f"sizes are positive, got {sizes}"
    one_of("batching.planner", planner, PLANNERS)
    one_of("batching.order", order, ORDERS)


def _check_widest(widest: int, dp_size: int, *, is_shared_by_tokens: bool) -> None:
    assert widest in widths_of(dp_size), f"widest={widest} is no power of two that divides {dp_size} ranks"
    assert widest == 1 or is_shared_by_tokens, "only token budgets are shared"


def _membership(units: Units, planner: str, mini_batch_size: int, seed: int) -> list[Ints]:
    """Ascending positions of the samples of each optimizer step."""
    if planner == "joint_free":
        block = blocks_of_one_mix(units.own_costs, mini_batch_size // units.largest, seed)
    else:
        block = blocks_in_order(units.sizes, mini_batch_size)
    return positions_of_blocks(block[units.unit])


def _packer(
    planner: str,
    dp_size: int,
    limits: Limits,
    largest: int,
    cost: Workload | Numbers,
    multiple_of: int,
    min_steps: int,
) -> Packer:
    """The function that packs one mini-batch; ``largest`` is the number of samples of the largest unit."""
    if limits.micro_batch_size is not None:
        fixed = plan_fixed_size_karmarkar_karp if planner == "karmarkar_karp" else plan_fixed_size
        num_units = limits.micro_batch_size // largest
        return lambda cost, length: fixed(cost, dp_size, num_units)
    plan: Callable[..., Packing] = plan_karmarkar_karp
    if planner != "karmarkar_karp":
        workload = cost if isinstance(cost, Workload) else Workload()
        plan = partial(plan_joint, step_cost=workload.step_cost)
        if limits.widest > 1:
            plan = partial(plan_wide, step_cost=workload.step_cost, widest=limits.widest, exchange=workload.exchange)
    return partial(
        plan, dp_size=dp_size, token_budget=limits.token_budget, multiple_of=multiple_of, min_steps=min_steps
    )


def _order_steps(packing: Packing, heights: Floats, order: str) -> Packing:
    """Order micro-steps by their most expensive micro-batch; ``heights`` is [num_steps, dp_size]."""
    falling = np.argsort(-heights.max(axis=1), kind="stable")
    if order == "largest_first":
        return packing.in_order(falling)
    return packing.in_order(np.concatenate([falling[::2][::-1], falling[1::2]]))  # the largest in the middle


def _assemble(
    metas: SampleMetas,
    block: Ints,
    units: Units,
    packing: Packing,
    sp_size: int,
    share_prompts: bool,
    exchange: Exchange,
) -> MiniBatchPlan:
    """Turn the packing of one mini-batch into its plan.

    Args:
        metas: all samples of the iteration.
        block: ascending positions of the samples of the mini-batch.
        units: which of them are computed, and their costs.
        packing: cells of those that are computed.
        sp_size, share_prompts: as in ``plan_batch``.
        exchange: what sharing a micro-batch costs.
    """
    computed = block[units.is_computed[block]]
    members, everyone = metas.take(computed), metas.take(block)
    tokens = np.where(members.is_padding, 0, members.length).astype(np.float64)  # [n]
    micro_batches = packing.members(computed)  # [step][rank]
    cells = list(chain.from_iterable(map(compress, micro_batches, packing.is_first.tolist())))
    num_dummies = sum(not cell for cell in cells)
    length = packing.sums(units.length[computed]) / packing.width
    heights = packing.heights(units.cost[computed], exchange)
    return MiniBatchPlan(
        micro_batches=tuple(zip(*micro_batches, strict=True)),
        totals=_totals(everyone, packing.dp_size, sp_size),
        cost=tuple(map(tuple, heights.T.tolist())),
        rank_tokens=tuple(round(t) for t in (packing.sums(tokens) / packing.width).sum(axis=0)),
        rank_tokens_unplanned=tuple(int(part.sum()) for part in np.array_split(tokens, packing.dp_size)),
        padding_tokens=int(members.length[members.is_padding].sum()) + DUMMY_TOKENS * num_dummies,
        num_skipped=len(block) - len(computed),
        shared_prompt_tokens=repeated_prompt_tokens(metas, cells) if share_prompts else 0,
        has_gradient=bool((everyone.has_gradient & ~everyone.is_padding).any()),
        longest_row=max(DUMMY_TOKENS, math.ceil(length.max(initial=0))),
        widths=() if packing.widths is None else tuple(map(tuple, packing.widths.T.tolist())),
        exchange_cost=0.0 if packing.widths is None else float(heights.sum() - units.cost[computed].sum()),
    )


def _totals(members: SampleMetas, dp_size: int, sp_size: int) -> StepTotals:
    live = np.flatnonzero(members.counts)
    groups, group = np.unique(members.group_id[live], return_inverse=True)
    tokens = np.zeros(len(groups), np.int64)
    np.add.at(tokens, group, members.loss_tokens[live])
    return StepTotals(
        tokens=int(tokens.sum()),
        sequences=len(live),
        dp_size=dp_size,
        sp_size=sp_size,
        group_tokens=dict(zip(groups.tolist(), tokens.tolist(), strict=True)),
    )


def _duplicates(positions: Sequence[int]) -> list[int]:
    return sorted(position for position, times in Counter(positions).items() if times > 1)
