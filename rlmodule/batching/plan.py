"""The plan: which samples share an optimizer step, and the data rank and micro-step of each of them.

Every process computes the same plan from lengths alone, without reading tokens. The planners are in ``joint.py``,
``karmarkar_karp.py`` and ``fixed_size.py``; their input is in ``units.py``, what they give in ``mini_batch_plan.py``.
Fetching and packing the samples is done in ``sampler.py`` and ``collate.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from rlmodule.batching.fixed_size import plan_fixed_size, plan_fixed_size_karmarkar_karp
from rlmodule.batching.joint import plan_joint
from rlmodule.batching.karmarkar_karp import plan_karmarkar_karp
from rlmodule.batching.limits import Limits
from rlmodule.batching.membership import blocks_in_order, blocks_of_one_mix, positions_of_blocks
from rlmodule.batching.mini_batch_plan import MiniBatchPlan, has_gradient, totals_of
from rlmodule.batching.packing import PackAll, Packing, PackingJob, pack_in_turn
from rlmodule.batching.partition import Ints
from rlmodule.batching.shared_prompts import repeated_prompt_tokens
from rlmodule.batching.units import Packer, Units, units_of
from rlmodule.batching.wide import plan_wide
from rlmodule.batching.workload import Exchange, Floats, Numbers, Workload
from rlmodule.core.config import one_of
from rlmodule.core.layout import widths_of
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.core.types import SampleMeta

# joint plans ranks and micro-steps together; joint_free also chooses which samples form a step; karmarkar_karp gives
# ranks equal counts, then plans each rank by itself.
PLANNERS = ("joint", "joint_free", "karmarkar_karp")
ORDERS = ("largest_first", "balanced_ends")  # the latter has small micro-steps at both ends, for pipelines

# A dummy micro-batch is one prompt token and one response token without loss.
DUMMY_TOKENS = 2


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
    data_order: Ints | None = None,
    pack_all: PackAll = pack_in_turn,
) -> tuple[MiniBatchPlan, ...]:
    """Plan every optimizer step of an iteration.

    Args:
        metas: the samples; plans hold positions into it.
        mini_batch_size, micro_batch_size, planner, order, keep_groups, share_prompts: as in ``BatchingConfig``.
        dp_size, sp_size: data ranks; sequence-parallel ranks, which only the totals need.
        token_budget: most tokens of one micro-batch (``max_token_len_per_gpu * sp_size``), unless its samples count.
        cost: cost model, or [n] the cost of each sample, or None for the default cost model.
        seed: of the membership of ``joint_free``; nothing else is random.
        multiple_of, min_steps: micro-steps are a multiple of the one, and at least the other where samples suffice.
        widest: most neighbouring ranks that share a micro-batch: a power of two that divides ``dp_size``; 1 for none.
        data_order: [n] positions of the samples in the order of the data; None for the order they have.
        pack_all: gives the packing of every mini-batch, also of those that other processes pack.

    Returns:
        One plan per optimizer step. Membership depends on the samples, their order and the seed, not on ``dp_size``.
        Skipped samples count in membership and totals; a step of skipped samples alone has dummy micro-batches only.

    Raises:
        ConfigError: an invalid setting, or a sample (or group, with ``keep_groups``) that is larger than a limit.
    """
    _check({"dp_size": dp_size, "multiple_of": multiple_of, "min_steps": min_steps}, planner, order)
    _check_widest(widest, dp_size, is_shared_by_tokens=micro_batch_size is None and planner != "karmarkar_karp")
    cost, metas = Workload() if cost is None else cost, SampleMetas.of(metas)
    data_order = np.arange(len(metas)) if data_order is None else data_order
    limits = Limits(mini_batch_size, token_budget, micro_batch_size, sp_size, widest)
    units = _units_within(limits, metas, data_order, cost, keep_groups=keep_groups, share_prompts=share_prompts)
    packer = _packer(planner, dp_size, limits, units.largest, cost, multiple_of, min_steps)
    exchange = cost.exchange if isinstance(cost, Workload) else Exchange()
    packed = partial(_packed, units, packer, limits, exchange, dp_size=dp_size, order=order, multiple_of=multiple_of)
    blocks = _membership(units, data_order, planner, mini_batch_size, seed)
    packings = pack_all([PackingJob(len(held), partial(packed, held)) for held in map(units.computed, blocks)])
    plans = tuple(
        _assemble(metas, block, units, packing, sp_size, share_prompts, exchange)
        for block, packing in zip(blocks, packings, strict=True)
    )
    _check_plans(plans, units)
    return plans


def _units_within(
    limits: Limits,
    metas: SampleMetas,
    data_order: Ints,
    cost: Workload | Numbers,
    *,
    keep_groups: bool,
    share_prompts: bool,
) -> Units:
    """The units of the samples.

    Raises:
        ConfigError: one of them is larger than a limit.
    """
    limits.check_samples(metas)
    units = units_of(metas, data_order, cost, keep_groups=keep_groups, share_prompts=share_prompts)
    if keep_groups:
        limits.check_groups(metas, units)
    return units


def _packed(
    units: Units,
    packer: Packer,
    limits: Limits,
    exchange: Exchange,
    computed: Ints,
    *,
    dp_size: int,
    order: str,
    multiple_of: int,
) -> Packing:
    """The packing of one mini-batch, its micro-steps in order; ``computed`` is [n], its samples but skipped ones."""
    packing = units.pack(computed, packer) if len(computed) else Packing(computed, 1, dp_size)
    tokens = packing.sums(units.length[computed]) / packing.width
    assert limits.micro_batch_size or tokens.max() <= limits.token_budget, "a micro-batch exceeds the budget"
    packing = _order_steps(packing, packing.heights(units.cost[computed], exchange), order)
    return packing.with_steps_multiple_of(multiple_of)


def _check_plans(plans: Sequence[MiniBatchPlan], units: Units) -> None:
    is_held = np.zeros(len(units.is_computed), bool)
    for plan in plans:
        is_held[plan.samples] = True
    assert sum(len(plan.samples) for plan in plans) == is_held.sum(), "no sample is in two plans"
    assert np.array_equal(is_held, units.is_computed), "all plans together hold each computed sample"


def _check(sizes: Mapping[str, int], planner: str, order: str) -> None:
    assert min(sizes.values()) >= 1, f"sizes are positive, got {sizes}"
    one_of("batching.planner", planner, PLANNERS)
    one_of("batching.order", order, ORDERS)


def _check_widest(widest: int, dp_size: int, *, is_shared_by_tokens: bool) -> None:
    assert widest in widths_of(dp_size), f"widest={widest} is no power of two that divides {dp_size} ranks"
    assert widest == 1 or is_shared_by_tokens, "only token budgets are shared"


def _membership(units: Units, data_order: Ints, planner: str, mini_batch_size: int, seed: int) -> list[Ints]:
    """Positions of the samples of each optimizer step, in the order of the data."""
    if planner == "joint_free":
        block = blocks_of_one_mix(units.own_costs(data_order), mini_batch_size // units.largest, seed)
    else:
        block = blocks_in_order(units.sizes, mini_batch_size)
    return [data_order[places] for places in positions_of_blocks(units.of_samples(block, data_order))]


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
        block: positions of the samples of the mini-batch, in the order of the data.
        units: which of them are computed, and their costs.
        packing: cells of those that are computed.
        sp_size, share_prompts: as in ``plan_batch``.
        exchange: what sharing a micro-batch costs.
    """
    computed = units.computed(block)
    everyone = metas.take(block)
    members = everyone if computed is block else metas.take(computed)
    tokens = np.where(members.is_padding, 0, members.length).astype(np.float64)  # [n]
    place, sizes = packing.by_rank()
    is_dummy = sizes == 0 if packing.widths is None else packing.is_first.T & (sizes == 0)
    length = packing.sums(units.length[computed]) / packing.width
    heights = packing.heights(units.cost[computed], exchange)
    return MiniBatchPlan(
        samples=computed[place].astype(np.int32),
        sizes=sizes,
        totals=totals_of(everyone, packing.dp_size, sp_size),
        cost=np.ascontiguousarray(heights.T),
        rank_tokens=tuple((packing.sums(tokens) / packing.width).sum(axis=0).tolist()),
        rank_tokens_unplanned=_sums_of_slices(tokens, packing.dp_size),
        padding_tokens=int(members.length[members.is_padding].sum()) + DUMMY_TOKENS * int(is_dummy.sum()),
        num_skipped=len(block) - len(computed),
        shared_prompt_tokens=repeated_prompt_tokens(members, packing.cell) if share_prompts else 0,
        has_gradient=has_gradient(everyone),
        longest_row=max(DUMMY_TOKENS, math.ceil(length.max(initial=0))),
        widths=None if packing.widths is None else np.ascontiguousarray(packing.widths.T),
        exchange_cost=0.0 if packing.widths is None else float(heights.sum() - units.cost[computed].sum()),
    )


def _sums_of_slices(tokens: Floats, count: int) -> tuple[int, ...]:
    """[n] whole numbers -> sums of ``count`` consecutive slices as equal as can be, the first ones longer."""
    ends = np.cumsum([len(tokens) // count + (part < len(tokens) % count) for part in range(count)])
    until = np.concatenate([[0.0], np.cumsum(tokens)])[[0, *ends]]
    return tuple(np.diff(until).astype(np.int64).tolist())
