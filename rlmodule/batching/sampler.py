"""Which samples this data rank runs, mini-batch by mini-batch: shuffles with a seed, plans, hands out its share.

Leaves out how a plan is made (``plan.py``) and how samples become tensors (``collate.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.utils.data import Sampler

from rlmodule.batching.equal_counts import required_multiple, top_up
from rlmodule.batching.plan import ORDERS, PLANNERS, MiniBatchPlan, plan_batch
from rlmodule.batching.workload import Workload
from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.types import POLICY, SampleMeta, StepTotals


@dataclass(frozen=True)
class BatchingConfig:
    """How an iteration's samples become optimizer steps and micro-batches."""

    mini_batch_size: int = 128  # samples of one optimizer step, over all ranks
    use_dynamic_bsz: bool = True  # True: micro-batches by token budget; False: by number of samples
    max_token_len_per_gpu: int = 16384  # tokens of one micro-batch on one device
    micro_batch_size_per_gpu: int | None = None  # samples of one micro-batch, with use_dynamic_bsz=false
    planner: str = "joint"  # joint, joint_free or karmarkar_karp
    order: str = "largest_first"  # order of micro-steps: largest_first or balanced_ends
    shuffle: bool = True  # draw mini-batches from a seeded shuffle of the iteration's samples
    share_prompts: bool = False  # compute a prompt once for the responses of its group that share a micro-batch
    equal_counts: bool = False  # top mini-batches up until every rank has the same number of samples; none is left out
    keep_groups: bool = False  # the samples of a group (responses to a prompt, a pair) share a micro-batch

    def __post_init__(self) -> None:
        at_least("mini_batch_size", self.mini_batch_size, 1)
        at_least("max_token_len_per_gpu", self.max_token_len_per_gpu, 2)
        one_of("planner", self.planner, PLANNERS)
        one_of("order", self.order, ORDERS)
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
                because="keep_groups is true, and fillers would take the places of samples that belong together",
                fix="Use batching.equal_counts=false, or batching.keep_groups=false",
            )


@dataclass(frozen=True)
class RankShare:
    """What one data rank runs of one mini-batch.

    Args:
        micro_batches: positions into the experience; an empty tuple is a zero-weight dummy.
        totals: counts of the whole mini-batch.
        metrics: facts of the plan, the same on every rank.
        trained_models: names of the models that take a step on it.
        has_gradient: whether any sample of it, over all ranks, can have a gradient.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    totals: StepTotals
    metrics: Mapping[str, float]
    trained_models: tuple[str, ...] = (POLICY,)
    has_gradient: bool = True


@dataclass(frozen=True)
class Pass:
    """One walk over all samples of an iteration.

    Args:
        epoch: keys the order; passes of one epoch walk in the same order.
        mini_batch_size: samples of one optimizer step, over all ranks.
        trained_models: names of the models that take a step on each mini-batch.
    """

    epoch: int
    mini_batch_size: int
    trained_models: tuple[str, ...]


class BalancedSampler(Sampler[RankShare]):
    """Mini-batches of one iteration, ``epochs`` times over, each time in a new order.

    The order is a function of (seed, iteration, epoch) and the number of samples alone, so it is the same on any number
    of ranks. Positions at or past ``len(metas)`` are fillers of equal-count mode.

    Args:
        metas: every sample of the iteration, the same list on every rank.
        config: sizes and planner.
        layout: where this process sits.
        seed, iteration: key the order.
        epochs: how often each model sees the samples.
        cost: cost model; None for the default of a 7B model.
        trained_models: name of each model that trains -> samples of its mini-batches; None for the policy alone. Models
        with
            mini-batches of one size share them; the others see the samples in mini-batches of their own.
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
    ) -> None:
        self.metas = list(metas)
        self.config = config
        self.layout = layout
        self.seed = seed
        self.iteration = iteration
        self.consumed = 0  # mini-batches handed out, over all epochs
        self._passes = passes_over(trained_models or {POLICY: config.mini_batch_size}, epochs)
        self._plans = tuple(self._plan(one, cost) for one in self._passes)

    def _plan(self, one: Pass, cost: Workload | None) -> tuple[MiniBatchPlan, ...]:
        config, layout = self.config, self.layout
        order = sample_order(len(self.metas), self.seed, self.iteration, one.epoch, shuffle=config.shuffle)
        metas = [self.metas[i] for i in order]
        places = order
        if config.equal_counts:
            metas = [replace(meta, is_skipped=False) for meta in metas]
            multiple = required_multiple(layout.dp_size, *(p.mini_batch_size for p in self._passes))
            metas = top_up(metas, multiple, one.mini_batch_size)
            real, filler = iter(order), iter(range(len(order), len(metas)))
            places = [next(filler) if meta.is_padding else next(real) for meta in metas]
        plans = plan_batch(
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
            keep_groups=config.keep_groups,
            share_prompts=config.share_prompts,
        )
        return tuple(replace(plan, micro_batches=_renumber(plan.micro_batches, places)) for plan in plans)

    @property
    def plans(self) -> tuple[MiniBatchPlan, ...]:
        """Every mini-batch of every pass, in the order they run."""
        return tuple(plan for one in self._plans for plan in one)

    @property
    def first_pass(self) -> tuple[MiniBatchPlan, ...]:
        """Plans of the first pass; inference over them gives the same forward shapes as the first update."""
        return self._plans[0]

    def owners(self, plans: Sequence[MiniBatchPlan]) -> dict[int, set[int]]:
        """Position -> data ranks that run it in ``plans``."""
        owners: dict[int, set[int]] = {}
        for plan in plans:
            for rank, steps in enumerate(plan.micro_batches):
                for position in (p for step in steps for p in step):
                    owners.setdefault(position, set()).add(rank)
        return owners

    def shares(self, plans: Sequence[MiniBatchPlan]) -> list[RankShare]:
        """This data rank's share of each plan."""
        rank = self.layout.dp_rank
        return [
            RankShare(plan.micro_batches[rank], plan.totals, plan.metrics, has_gradient=plan.has_gradient)
            for plan in plans
        ]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[RankShare]:
        if self.consumed >= len(self):
            self.consumed = 0
        for share in self.remaining():
            self.consumed += 1
            yield share

    def remaining(self) -> list[RankShare]:
        """What is still to be handed out; once all was, the whole again."""
        trained_models = [
            one.trained_models for one, plans in zip(self._passes, self._plans, strict=True) for _ in plans
        ]
        shares = [
            replace(s, trained_models=names) for s, names in zip(self.shares(self.plans), trained_models, strict=True)
        ]
        return shares[self.consumed % max(len(self), 1) :]

    def state_dict(self) -> dict[str, int]:
        """Iteration and mini-batches handed out so far."""
        return {"iteration": self.iteration, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the mini-batches that ``state`` had handed out of the same iteration."""
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


def _renumber(
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...], places: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Positions of the shuffled list -> positions of the original one."""
    return tuple(tuple(tuple(places[p] for p in step) for step in steps) for steps in micro_batches)


def sample_order(count: int, seed: int, iteration: int, epoch: int, *, shuffle: bool = True) -> list[int]:
    """Order of ``count`` samples; a function of its arguments alone, on any machine and any number of ranks."""
    if not shuffle:
        return list(range(count))
    key = np.random.SeedSequence([seed & 0xFFFFFFFF, iteration, epoch])
    return [int(i) for i in np.random.Generator(np.random.Philox(key)).permutation(count)]
