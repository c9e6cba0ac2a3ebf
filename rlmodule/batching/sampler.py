"""The sampler: shuffles the samples of an iteration with a seed, plans them and yields the share of this data rank.

Planning is in ``plan.py``, packing in ``collate.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.utils.data import Sampler

from rlmodule.batching.equal_counts import required_multiple, top_up
from rlmodule.batching.mini_batch_plan import MiniBatchPlan
from rlmodule.batching.packing import PackAll, pack_in_turn
from rlmodule.batching.partition import Ints
from rlmodule.batching.plan import ORDERS, PLANNERS, plan_batch
from rlmodule.batching.workload import Workload
from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout, place_of
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.core.slices import SlicePlace
from rlmodule.core.types import POLICY, SampleMeta, StepTotals

STEPS_PER_STAGE = 4  # micro-steps for each pipeline stage: it is then idle for less than a fifth of a step


@dataclass(frozen=True)
class BatchingConfig:
    """How the samples of an iteration are split into optimizer steps and micro-batches."""

    mini_batch_size: int = 128  # samples of one optimizer step, over all ranks
    use_dynamic_bsz: bool = True  # True: micro-batches by token budget; False: by number of samples
    max_token_len_per_gpu: int = 16384  # tokens of one micro-batch on one device
    micro_batch_size_per_gpu: int | None = None  # samples of one micro-batch, with use_dynamic_bsz=false
    planner: str = "joint"  # joint, joint_free or karmarkar_karp
    order: str = "largest_first"  # order of micro-steps: largest_first or balanced_ends
    shuffle: bool = True  # draw mini-batches from a seeded shuffle of the iteration's samples
    share_prompts: bool = False  # compute a prompt once for the responses of its group that share a micro-batch
    equal_counts: bool = False  # add padding samples until all ranks have equal counts; no sample is skipped then
    min_micro_steps: int | None = None  # of an optimizer step, where samples suffice; None: 4 per pipeline stage
    keep_groups: bool = False  # the samples of a group (responses to a prompt, a pair) share a micro-batch
    max_sp_size: int = 1  # most neighbouring data ranks that share a row where that levels a micro-step; 2, 4, 8, ...
    sp_overhead: float = 0.03  # cost of exchanging heads over that of a shared row, see ``workload.Exchange``
    sp_overhead_across_nodes: float | None = None  # the same between nodes; null: rows are shared within a node

    def __post_init__(self) -> None:
        at_least("mini_batch_size", self.mini_batch_size, 1)
        at_least("max_token_len_per_gpu", self.max_token_len_per_gpu, 2)
        if self.min_micro_steps is not None:
            at_least("min_micro_steps", self.min_micro_steps, 1)
        one_of("planner", self.planner, PLANNERS)
        one_of("order", self.order, ORDERS)
        at_least("max_sp_size", self.max_sp_size, 1)
        at_least("sp_overhead", self.sp_overhead, 0.0)
        if self.sp_overhead_across_nodes is not None:
            at_least("sp_overhead_across_nodes", self.sp_overhead_across_nodes, 0.0)
        if not self.use_dynamic_bsz and self.micro_batch_size_per_gpu is None:
            raise ConfigError(
                key="micro_batch_size_per_gpu",
                got=None,
                because="use_dynamic_bsz=false needs the number of samples of a micro-batch",
                fix="Set batching.micro_batch_size_per_gpu=8, or batching.use_dynamic_bsz=true",
            )
        if self.micro_batch_size_per_gpu is not None:
            at_least("micro_batch_size_per_gpu", self.micro_batch_size_per_gpu, 1)
        if self.keep_groups and self.equal_counts:
            raise ConfigError(
                key="equal_counts",
                got=True,
                because="keep_groups is true, and padding samples would take the places of samples of a group",
                fix="Use batching.equal_counts=false, or batching.keep_groups=false",
            )

    def fewest_micro_steps(self, layout: Layout) -> int:
        """Micro-steps that an optimizer step has at least, where there are samples for as many.

        A pipeline of p stages is idle for (p - 1) / M of a step of M micro-steps, so by default there are 4 p of them.
        """
        if not self.use_dynamic_bsz:
            return 1  # samples are counted, whatever that gives
        if self.min_micro_steps is not None:
            return self.min_micro_steps
        return 1 if layout.pp_size == 1 else STEPS_PER_STAGE * layout.pp_size


@dataclass(frozen=True)
class RankShare:
    """The part of one mini-batch that one data rank computes.

    Args:
        micro_batches: positions of the samples of each micro-batch; an empty tuple is a dummy micro-batch without loss.
        slices: of each micro-batch, the slice that this rank has of it; empty where none is shared.
        totals: counts of the whole mini-batch.
        metrics: metrics of the plan, the same on every rank.
        trained_models: names of the models that take an optimizer step on the mini-batch.
        has_gradient: whether any sample of it, over all ranks, can have a gradient.
        longest_row: tokens of the longest micro-batch of any rank.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    totals: StepTotals
    metrics: Mapping[str, float]
    trained_models: tuple[str, ...] = (POLICY,)
    has_gradient: bool = True
    longest_row: int = 0
    slices: tuple[SlicePlace, ...] = ()


@dataclass(frozen=True)
class Pass:
    """One pass over all samples of an iteration.

    Args:
        epoch: number of the pass; the shuffle depends on it.
        mini_batch_size: samples of one optimizer step, over all ranks.
        trained_models: names of the models that take an optimizer step on each mini-batch.
    """

    epoch: int
    mini_batch_size: int
    trained_models: tuple[str, ...]


class BalancedSampler(Sampler[RankShare]):
    """Yields this rank's share of every mini-batch of one iteration, for ``epochs`` passes in different orders.

    The order depends on (seed, iteration, epoch) and the number of samples alone, so it is the same on any number of
    ranks. With ``equal_counts``, positions from ``len(metas)`` on are padding samples.

    Args:
        metas: all samples of the iteration, the same list on every rank.
        config: sizes and planner.
        layout: the parallel layout and the place of this process in it.
        seed, iteration: the shuffle depends on them.
        epochs: passes over the samples, for each model.
        cost: cost model; None for the default of a 7B model.
        trained_models: name of each trained model -> samples of its mini-batches; None for the policy alone. Models
            with equal mini-batch sizes train on the same mini-batches, the others in passes of their own.
        pack_all: as in ``plan_batch``.
    """

    def __init__(
        self,
        metas: Sequence[SampleMeta],
        config: BatchingConfig,
        layout: Layout,
        *,
        seed: int,
        iteration: int,
        epochs: int = 1,
        cost: Workload | None = None,
        trained_models: Mapping[str, int] | None = None,
        pack_all: PackAll = pack_in_turn,
    ) -> None:
        self.metas = SampleMetas.of(metas)
        self.config = config
        self.layout = layout
        self.seed = seed
        self.iteration = iteration
        self.consumed = 0  # mini-batches yielded so far, over all epochs
        self._passes = passes_over(trained_models or {POLICY: config.mini_batch_size}, epochs)
        self._plans = tuple(self._plan(one, cost, pack_all) for one in self._passes)

    def _plan(self, one: Pass, cost: Workload | None, pack_all: PackAll) -> tuple[MiniBatchPlan, ...]:
        config, layout = self.config, self.layout
        order = sample_order(len(self.metas), self.seed, self.iteration, one.epoch, shuffle=config.shuffle)
        metas = self.metas
        if config.equal_counts:
            multiple = required_multiple(layout.dp_size, *(p.mini_batch_size for p in self._passes))
            metas, order = _topped_up(metas, order, multiple, one.mini_batch_size)
        return plan_batch(
            metas,
            mini_batch_size=one.mini_batch_size,
            dp_size=layout.dp_size,
            token_budget=config.max_token_len_per_gpu * layout.sp_size,
            cost=cost,
            planner=config.planner,
            seed=self.seed + self.iteration,
            sp_size=layout.sp_size,
            micro_batch_size=None if config.use_dynamic_bsz else config.micro_batch_size_per_gpu,
            order=config.order,
            min_steps=config.fewest_micro_steps(layout),
            keep_groups=config.keep_groups,
            share_prompts=config.share_prompts,
            widest=layout.max_sp_size,
            data_order=order,
            pack_all=pack_all,
        )

    @property
    def plans(self) -> tuple[MiniBatchPlan, ...]:
        """Plans of every mini-batch of every pass, in training order."""
        return tuple(plan for one in self._plans for plan in one)

    @property
    def first_pass(self) -> tuple[MiniBatchPlan, ...]:
        """Plans of the first pass; scoring uses them, so its forward passes have the shapes of the first update."""
        return self._plans[0]

    def recount(self, metas: Sequence[SampleMeta]) -> None:
        """Take the totals from loss tokens that changed after planning; who computes which sample stays.

        Args:
            metas: the samples as they are now, in the order of those that were planned.
        """
        is_planned = np.zeros(len(self.metas), bool)
        for plan in self.plans:
            is_planned[plan.samples[plan.samples < len(self.metas)]] = True
        left_out = np.flatnonzero(~is_planned & (self.metas.loss_tokens != 0))
        assert not len(left_out), f"samples {left_out.tolist()} count in the totals and are in no plan"
        self.metas = SampleMetas.of(metas)
        self._plans = tuple(tuple(plan.recounted(self.metas) for plan in plans) for plans in self._plans)

    def owners(self, plans: Sequence[MiniBatchPlan], positions: Collection[int]) -> dict[int, set[int]]:
        """Each of some positions -> data ranks that compute the sample in ``plans``; those of none are left out."""
        wanted, owners = np.array(list(positions), np.int64), dict[int, set[int]]()
        for plan in plans:
            first, width = plan.ranks_of(wanted)
            for position, rank, ranks in zip(wanted.tolist(), first.tolist(), width.tolist(), strict=True):
                if ranks:
                    owners.setdefault(position, set()).update(range(rank, rank + ranks))
        return owners

    def shares(self, plans: Sequence[MiniBatchPlan]) -> list[RankShare]:
        """This data rank's share of each plan."""
        rank = self.layout.dp_rank
        return [
            RankShare(
                plan.micro_batches_of(rank),
                plan.totals,
                plan.metrics,
                has_gradient=plan.has_gradient,
                longest_row=plan.longest_row,
                slices=self._slices(plan),
            )
            for plan in plans
        ]

    def _slices(self, plan: MiniBatchPlan) -> tuple[SlicePlace, ...]:
        rank, parts_of = self.layout.dp_rank, self.layout.parts_of
        widths = [] if plan.widths is None else plan.widths[rank].tolist()
        return tuple(SlicePlace(width, place_of(rank, width), parts_of(width)) for width in widths)

    def speakers(self, plans: Sequence[MiniBatchPlan], positions: Collection[int]) -> dict[int, int]:
        """Each of some positions -> the first data rank that computes it in ``plans``: what is summed counts there."""
        return {position: min(ranks) for position, ranks in self.owners(plans, positions).items()}

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[RankShare]:
        if self.consumed >= len(self):
            self.consumed = 0
        for share in self.remaining():
            self.consumed += 1
            yield share

    def remaining(self) -> list[RankShare]:
        """Shares that were not yielded yet; all of them again once every one was."""
        trained_models = [
            one.trained_models for one, plans in zip(self._passes, self._plans, strict=True) for _ in plans
        ]
        shares = [
            replace(s, trained_models=names) for s, names in zip(self.shares(self.plans), trained_models, strict=True)
        ]
        return shares[self.consumed % max(len(self), 1) :]

    def state_dict(self) -> dict[str, int]:
        """Iteration and number of mini-batches yielded so far."""
        return {"iteration": self.iteration, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Skip the mini-batches that the saved run had trained on in the same iteration."""
        assert state["iteration"] == self.iteration, f"state of iteration {state['iteration']}, not {self.iteration}"
        self.consumed = state["consumed"]


def passes_over(trained_models: Mapping[str, int], epochs: int) -> tuple[Pass, ...]:
    """``epochs`` passes for each distinct mini-batch size, in the order of ``trained_models`` (name -> size)."""
    sizes = dict.fromkeys(trained_models.values())
    return tuple(
        Pass(epoch, size, tuple(name for name, wanted in trained_models.items() if wanted == size))
        for epoch in range(epochs)
        for size in sizes
    )


def _topped_up(metas: SampleMetas, order: Ints, multiple: int, mini_batch_size: int) -> tuple[SampleMetas, Ints]:
    """The samples, all of them computed, with padding samples after the last; and the order of the data with those."""
    computed = replace(metas, is_skipped=np.zeros(len(metas), bool))
    in_order = SampleMetas.of(top_up(computed.take(order), multiple, mini_batch_size))
    positions = np.empty(len(in_order), np.int64)
    positions[~in_order.is_padding] = order
    positions[in_order.is_padding] = np.arange(len(order), len(in_order))
    return in_order.take(np.argsort(positions)), positions


def sample_order(count: int, seed: int, iteration: int, epoch: int, *, shuffle: bool = True) -> Ints:
    """[count] int64 permutation of samples; depends on the arguments alone, on any machine and any number of ranks."""
    if not shuffle:
        return np.arange(count)
    key = np.random.SeedSequence([seed & 0xFFFFFFFF, iteration, epoch])
    return np.random.Generator(np.random.Philox(key)).permutation(count)
