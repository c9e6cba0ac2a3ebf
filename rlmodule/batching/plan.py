"""The plan: which samples share an optimizer step, on which data rank and in which micro-step each of them trains.

Made from lengths alone, alike in every process, without a collective and without reading a token. The planners are in
``joint.py`` and ``classic.py``; what the cells cost is in ``workload.py``. Leaves out fetching and packing the samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np

from rlmodule.batching.classic import plan_classic, plan_fixed_size, plan_fixed_size_classic
from rlmodule.batching.joint import plan_joint
from rlmodule.batching.limits import check_groups, check_lengths
from rlmodule.batching.membership import (
    blocks_in_order,
    blocks_of_one_mix,
    numbered_by_appearance,
    positions_of_blocks,
)
from rlmodule.batching.packing import Packing
from rlmodule.batching.partition import Ints
from rlmodule.batching.shared_prompts import repeated_prompt_tokens, with_shared_prompts
from rlmodule.batching.workload import Floats, Numbers, Workload, as_floats
from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.types import SampleMeta, StepTotals

Output = TypeVar("Output")
Packer = Callable[[Floats, Ints], Packing]  # [n] cost and tokens of what is packed -> where it sits

PLANNERS = ("joint", "joint_free", "karmarkar_karp")
ORDERS = ("largest_first", "balanced_ends")

# A dummy micro-batch is the shortest sample that can be: one prompt token and one response token.
DUMMY_TOKENS = 2


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer step over all data ranks.

    Args:
        micro_batches: [rank][micro-step] positions of samples, ascending; empty stands for a dummy of weight zero.
        totals: counts of the whole mini-batch; padding counts nowhere.
        cost: [rank][micro-step] FLOPs, or the unit of the costs given.
        rank_tokens: [rank] tokens of each rank in this plan, padding and dummies left out.
        rank_tokens_unplanned: [rank] the same had the mini-batch been dealt out in equal slices, as it came.
        padding_tokens: tokens computed for nothing: padding samples and dummies.
        num_left_out: samples that count in the totals and are not computed.
        shared_prompt_tokens: prompt tokens that are not computed again, as another sample of the group has them.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    totals: StepTotals
    cost: tuple[tuple[float, ...], ...]
    rank_tokens: tuple[int, ...]
    rank_tokens_unplanned: tuple[int, ...]
    padding_tokens: int
    num_left_out: int = 0
    shared_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        held = self.positions
        assert len(set(held)) == len(held), f"a plan holds each sample once, twice here: {_doubled(held)}"
        steps = {len(rank) for rank in self.micro_batches}
        assert len(steps) == 1, f"every rank needs the same number of micro-steps, got {sorted(steps)}"
        assert [len(rank) for rank in self.cost] == [len(rank) for rank in self.micro_batches], (
            "one cost per micro-batch"
        )

    @property
    def positions(self) -> list[int]:
        """Every position held, rank by rank and micro-step by micro-step."""
        return [position for rank in self.micro_batches for micro_batch in rank for position in micro_batch]

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps, the same on every rank."""
        return len(self.micro_batches[0])

    @property
    def lockstep_cost(self) -> float:
        """Cost of the step when all ranks wait for the slowest in every micro-step."""
        return float(sum(max(step) for step in zip(*self.cost, strict=True)))

    @property
    def lockstep_efficiency(self) -> float:
        """Mean work of a rank over ``lockstep_cost``; 1.0 when no rank ever waits."""
        return self._mean_rank_cost / self.lockstep_cost if self.lockstep_cost else 1.0

    @property
    def max_over_mean(self) -> float:
        """Work of the busiest rank over the mean; 1.0 is perfect."""
        return max(map(sum, self.cost)) / self._mean_rank_cost if self._mean_rank_cost else 1.0

    @property
    def metrics(self) -> dict[str, float]:
        """What is logged with the step; tokens under ``global_seqlen/`` are sums over one data rank."""
        before, after = self.rank_tokens_unplanned, self.rank_tokens
        facts = {
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
            "balance/left_out_samples": self.num_left_out,
            "balance/shared_prompt_tokens": self.shared_prompt_tokens,
        }
        return {name: float(value) for name, value in facts.items()}

    @property
    def _mean_rank_cost(self) -> float:
        return sum(map(sum, self.cost)) / len(self.cost)


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
    keep_groups: bool = False,
    share_prompts: bool = False,
) -> tuple[MiniBatchPlan, ...]:
    """Plan every optimizer step of an iteration.

    Args:
        metas: the samples, in the order of the data; plans hold positions into it.
        mini_batch_size: samples of one optimizer step; the last step may have fewer.
        dp_size: data ranks.
        token_budget: most tokens of one micro-batch (``max_token_len_per_gpu * sp_size``).
        cost: what samples cost: a Workload, one number per sample, or None for the default Workload.
        planner: ``joint`` (ranks and micro-steps together), ``joint_free`` (the same, and the planner chooses which
            samples form a step), ``karmarkar_karp`` (equal counts per rank, then every rank by itself).
        seed: deals the samples of ``joint_free``; nothing else is drawn.
        sp_size: sequence ranks, passed on to the totals.
        micro_batch_size: samples per micro-batch; given, the token budget is not applied.
        order: ``largest_first`` (out-of-memory shows at once) or ``balanced_ends`` (small at both ends, for pipelines).
        multiple_of: the number of micro-steps is raised to a multiple of this.
        keep_groups: the samples of a group share a micro-batch. A group is then planned as if it were one sample, and
            ``mini_batch_size`` and ``micro_batch_size`` are the most samples that whole groups may add up to.
        share_prompts: the prompt of a group is computed once in a micro-batch; with ``keep_groups`` its tokens and its
            cost are counted once, which needs a Workload.

    Returns:
        One plan per optimizer step. Membership depends on the samples, their order and the seed, not on ``dp_size``.
        Samples that are left out take part in membership and totals; a step of nothing else has dummies only.

    Raises:
        ConfigError: a setting that cannot work, or a sample (a group, where they are kept) that fits nowhere.
    """
    _check_settings(mini_batch_size, dp_size, token_budget, planner, micro_batch_size, order, multiple_of)
    if micro_batch_size is None:
        check_lengths([m for m in metas if not m.is_left_out], token_budget, sp_size)
    length = np.fromiter((m.length for m in metas), np.int64, len(metas))
    costs, step_cost = _costs(metas, length, cost)
    is_left_out = np.fromiter((m.is_left_out for m in metas), np.bool_, len(metas))
    unit = np.arange(len(metas))  # what is planned as one
    placed_length, placed_cost = length, costs
    if keep_groups:
        unit = numbered_by_appearance(np.fromiter((m.group_id for m in metas), np.int64, len(metas)))
        if share_prompts:
            assert cost is None or isinstance(cost, Workload), "numbers do not say what a prompt costs"
            placed_length, placed_cost = with_shared_prompts(metas, unit, length, costs, cost or Workload())
        check_groups(
            metas,
            unit,
            np.where(is_left_out, 0, placed_length),
            mini_batch_size=mini_batch_size,
            micro_batch_size=micro_batch_size,
            token_budget=token_budget,
            sp_size=sp_size,
        )
    largest = int(np.bincount(unit).max(initial=1))  # samples
    units_per_micro_batch = None if micro_batch_size is None else micro_batch_size // largest
    pack = _packer(planner, dp_size, token_budget, units_per_micro_batch, step_cost, multiple_of)
    if planner == "joint_free":
        block_of_unit = blocks_of_one_mix(_sums(unit, costs), mini_batch_size // largest, seed)
    else:
        block_of_unit = blocks_in_order(np.bincount(unit), mini_batch_size)
    plans = []
    for block in positions_of_blocks(block_of_unit[unit]):
        computed = block[~is_left_out[block]]
        block_cost, block_length = placed_cost[computed], placed_length[computed]
        if len(computed) == 0:
            packing = Packing(computed, 1, dp_size)
        elif keep_groups:
            packing = _packed_by_group(block_cost, block_length, unit[computed], pack)
        else:
            packing = pack(block_cost, block_length)
        assert micro_batch_size or packing.sums(block_length).max() <= token_budget, "a micro-batch exceeds the budget"
        totals = _totals([metas[position] for position in block.tolist()], dp_size, sp_size)
        plan = _assemble(metas, computed, block_cost, packing, totals, order, multiple_of)
        shared = repeated_prompt_tokens(metas, chain.from_iterable(plan.micro_batches)) if share_prompts else 0
        plans.append(replace(plan, num_left_out=len(block) - len(computed), shared_prompt_tokens=shared))
    held = np.sort(np.fromiter(chain.from_iterable(plan.positions for plan in plans), np.int64))
    assert np.array_equal(held, np.flatnonzero(~is_left_out)), "the plans together hold each computed sample once"
    return tuple(plans)


def required_multiple(dp_size: int, *mini_batch_sizes: int) -> int:
    """Smallest batch size that equal counts per rank and whole mini-batches of every trained model allow."""
    return math.lcm(dp_size, *mini_batch_sizes)


def top_up(metas: Sequence[SampleMeta], multiple: int, mini_batch_size: int) -> list[SampleMeta]:
    """Add fillers until the number of samples is a multiple; the samples keep their order.

    Args:
        metas: the samples.
        multiple: see ``required_multiple``.
        mini_batch_size: fillers are spread evenly over the mini-batches of this size, each at the end of its share.

    Returns:
        The samples and ``-len(metas) % multiple`` fillers of one prompt and one response token without loss; sample
        and group ids of fillers are negative and new.
    """
    size = len(metas) + -len(metas) % multiple
    num_fillers = size - len(metas)
    below = min([0, *(m.sample_id for m in metas), *(m.group_id for m in metas)])
    filled: list[SampleMeta] = []
    real = iter(metas)
    added = 0
    for start in range(0, size, mini_batch_size):
        end = min(start + mini_batch_size, size)
        due = end * num_fillers // size - added
        filled += [next(real) for _ in range(end - start - due)]
        filled += [_filler(below - added - i) for i in range(1, due + 1)]
        added += due
    return filled


def restore_order(
    micro_indices: Sequence[Sequence[int | None]], micro_outputs: Sequence[Sequence[Output]]
) -> list[Output]:
    """Results of micro-batches back in input order.

    Args:
        micro_indices: [micro-batch][sample] place of each sample in the input; None for what was added to fill up.
        micro_outputs: the result of each, of any kind and length.

    Returns:
        The results by place; those of fillers are left out.
    """
    by_place = {
        place: output
        for indices, outputs in zip(micro_indices, micro_outputs, strict=True)
        for place, output in zip(indices, outputs, strict=True)
        if place is not None
    }
    wanted = sum(place is not None for indices in micro_indices for place in indices)
    assert len(by_place) == wanted, f"{wanted} results for {len(by_place)} places"
    return [by_place[place] for place in sorted(by_place)]


def _filler(new_id: int) -> SampleMeta:
    return SampleMeta(sample_id=new_id, group_id=new_id, prompt_len=1, response_len=1, loss_tokens=0, is_padding=True)


def _check_settings(
    mini_batch_size: int,
    dp_size: int,
    token_budget: int,
    planner: str,
    micro_batch_size: int | None,
    order: str,
    multiple_of: int,
) -> None:
    assert min(dp_size, multiple_of) >= 1, f"sizes are positive, got dp_size={dp_size}, multiple_of={multiple_of}"
    settings = {"mini_batch_size": mini_batch_size, "micro_batch_size_per_gpu": micro_batch_size}
    if micro_batch_size is None:
        settings["max_token_len_per_gpu"] = token_budget
    for name, value in settings.items():
        if value is not None and value < 1:
            raise ConfigError(key=f"batching.{name}", got=value, because="not a positive number", fix="Use 1 or more")
    for name, word, known in (("planner", planner, PLANNERS), ("order", order, ORDERS)):
        if word not in known:
            raise ConfigError(
                key=f"batching.{name}", got=word, because=f"no {name} has that name", fix=did_you_mean(word, known)
            )


def _packer(
    planner: str,
    dp_size: int,
    token_budget: int,
    micro_batch_size: int | None,
    step_cost: float,
    multiple_of: int,
) -> Packer:
    """How one mini-batch is packed."""
    if micro_batch_size is not None:
        fixed = plan_fixed_size_classic if planner == "karmarkar_karp" else plan_fixed_size
        return lambda cost, length: fixed(cost, dp_size, micro_batch_size)
    if planner == "karmarkar_karp":
        return partial(plan_classic, dp_size=dp_size, token_budget=token_budget, multiple_of=multiple_of)
    return partial(plan_joint, dp_size=dp_size, token_budget=token_budget, step_cost=step_cost, multiple_of=multiple_of)


def _packed_by_group(cost: Floats, length: Ints, group: Ints, pack: Packer) -> Packing:
    """Packs each group as one item that costs and holds what its samples do together; all arguments are [n]."""
    _, item = np.unique(group, return_inverse=True)
    packing = pack(_sums(item, cost), _sums(item, length).astype(np.int64))
    return replace(packing, cell=packing.cell[item])


def _sums(unit: Ints, values: Floats | Ints) -> Floats:
    """[n] a number per sample -> [u] its sum over each unit."""
    return np.bincount(unit, weights=values).astype(np.float64, copy=False)


def _costs(metas: Sequence[SampleMeta], length: Ints, cost: Workload | Numbers | None) -> tuple[Floats, float]:
    """[n] float64 cost of every sample, and the price of a micro-step in the same unit."""
    if cost is None or isinstance(cost, Workload):
        workload = cost or Workload()
        loss_tokens = np.fromiter((m.loss_tokens for m in metas), np.int64, len(metas))
        return workload.cost(length, loss_tokens), workload.step_cost
    costs = as_floats(cost)
    assert costs.shape == length.shape, f"one cost per sample: {len(length)} samples, costs of shape {costs.shape}"
    assert (np.isfinite(costs) & (costs >= 0)).all(), "costs are finite and not negative"
    return costs, 0.0


def _assemble(
    metas: Sequence[SampleMeta],
    computed: Ints,
    cost: Floats,
    packing: Packing,
    totals: StepTotals,
    order: str,
    multiple_of: int,
) -> MiniBatchPlan:
    """Order the micro-steps, name the samples by position and count what the log needs."""
    packing = packing.in_order(_step_order(packing.sums(cost).max(axis=1), order)).with_steps_multiple_of(multiple_of)
    members = [metas[position] for position in computed.tolist()]
    tokens = np.array([0 if m.is_padding else m.length for m in members], np.float64)  # [n]
    micro_batches = packing.members(computed)  # [step][rank]
    costs = packing.sums(cost)  # [step, rank]
    num_dummies = sum(not micro_batch for step in micro_batches for micro_batch in step)
    return MiniBatchPlan(
        micro_batches=tuple(zip(*micro_batches, strict=True)),
        totals=totals,
        cost=tuple(map(tuple, costs.T.tolist())),
        rank_tokens=tuple(int(t) for t in packing.sums(tokens).sum(axis=0)),
        rank_tokens_unplanned=tuple(int(part.sum()) for part in np.array_split(tokens, packing.dp_size)),
        padding_tokens=sum(m.length for m in members if m.is_padding) + DUMMY_TOKENS * num_dummies,
    )


def _totals(members: Sequence[SampleMeta], dp_size: int, sp_size: int) -> StepTotals:
    live = [m for m in members if m.loss_tokens > 0 and not m.is_padding]
    group_tokens: Counter[int] = Counter()
    for m in live:
        group_tokens[m.group_id] += m.loss_tokens
    return StepTotals(
        tokens=sum(group_tokens.values()),
        sequences=len(live),
        dp_size=dp_size,
        sp_size=sp_size,
        group_tokens=dict(group_tokens),
    )


def _step_order(step_cost: Floats, order: str) -> Ints:
    """[M] height of each micro-step -> [M] the order they run in."""
    falling = np.argsort(-step_cost, kind="stable")
    if order == "largest_first":
        return falling
    return np.concatenate([falling[::2][::-1], falling[1::2]])  # the largest in the middle


def _doubled(positions: Sequence[int]) -> list[int]:
    return sorted(position for position, times in Counter(positions).items() if times > 1)
