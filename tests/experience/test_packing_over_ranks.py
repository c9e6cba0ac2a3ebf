"""Mini-batches that ranks pack for each other: the plan is the one that each of them makes alone."""

from dataclasses import dataclass, replace
from functools import partial
from threading import Barrier, Thread

import numpy as np
import pytest
import torch

from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.batching.workload import Exchange, Workload
from rlmodule.core.layout import Layout
from rlmodule.core.types import SampleMeta
from rlmodule.experience.packing_over_ranks import MANY_SAMPLES, PackingOverRanks
from strategies.parts.collectives import GroupCollectives
from tests.helpers.ranks import run_on_ranks

LENGTHS = np.random.default_rng(0).lognormal(4.0, 1.2, 96).clip(4, 900).astype(int).tolist()
METAS = [SampleMeta(3 * i, i // 4, 2, n - 2, n - 2, is_skipped=i % 9 == 0) for i, n in enumerate(LENGTHS)]
# One is longer than the budget of a rank, so that four ranks share it.
WITH_A_LONG_ONE = [replace(meta, response_len=3500) if meta.sample_id == 21 else meta for meta in METAS]


@dataclass
class InThreads:
    """Sums over ranks that are threads of one process; counts how often they are asked for."""

    barrier: Barrier
    told: list
    rank: int
    calls: int = 0

    def sum_numbers(self, numbers):
        self.calls += 1
        self.told[self.rank] = numbers.clone()
        self.barrier.wait(60)
        total = torch.stack(self.told).sum(0).to(numbers.dtype)
        self.barrier.wait(60)
        return total


def sampler_of(layout, pack_all=None, *, epochs=1, **keys):
    config = BatchingConfig(**{"mini_batch_size": 32, "max_token_len_per_gpu": 1000, **keys})
    given = {} if pack_all is None else {"pack_all": pack_all}
    cost = Workload(exchange=Exchange(0.03, 0.03))
    metas = METAS if layout.max_sp_size == 1 else WITH_A_LONG_ONE
    return BalancedSampler(metas, config, layout, seed=1, iteration=2, epochs=epochs, cost=cost, **given)


def packed_together(ranks, many_samples=1, **keys):
    """The samplers of all ranks, and how many sums each took part in."""
    barrier, told, samplers = Barrier(ranks), [None] * ranks, [None] * ranks
    collectives = [InThreads(barrier, told, rank) for rank in range(ranks)]
    sp_size, max_sp_size = keys.pop("sp_size", 1), keys.pop("max_sp_size", 1)

    def play(rank):
        layout = Layout(ranks, rank, sp_size=sp_size, max_sp_size=max_sp_size)
        samplers[rank] = sampler_of(layout, PackingOverRanks(layout, collectives[rank], many_samples), **keys)

    threads = [Thread(target=play, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return samplers, [c.calls for c in collectives]


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (2, {}),
        (2, {"mini_batch_size": 8}),
        (8, {"epochs": 2}),
        (4, {"sp_size": 2}),
        (4, {"max_sp_size": 4}),
        (3, {"planner": "joint_free", "order": "balanced_ends"}),
        (3, {"planner": "karmarkar_karp", "equal_counts": True}),
        (2, {"keep_groups": True, "share_prompts": True}),
        (2, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3}),
    ],
    ids=str,
)
def test_the_plan_is_the_one_that_every_rank_makes_alone(ranks, keys):
    """With more ranks than mini-batches and with fewer; every metric and every share of a rank is part of it."""
    samplers, calls = packed_together(ranks, **keys)
    alone = sampler_of(samplers[0].layout, **{k: v for k, v in keys.items() if k not in ("sp_size", "max_sp_size")})
    for sampler in samplers:
        assert sampler.plans == alone.plans
        assert [plan.metrics for plan in sampler.plans] == [plan.metrics for plan in alone.plans]
        assert sampler.owners(sampler.plans, range(96)) == alone.owners(alone.plans, range(96))
    assert calls == [2 * keys.get("epochs", 1)] * ranks, "sizes and numbers, for every pass"
    if "max_sp_size" in keys:
        assert any(plan.shared_rows for plan in alone.plans), "and rows are shared"


@pytest.mark.parametrize(
    ("ranks", "many", "keys"),
    [(2, 97, {}), (2, MANY_SAMPLES, {}), (2, 1, {"mini_batch_size": 96}), (1, 1, {})],
    ids=["few samples", "by default", "one mini-batch", "one rank"],
)
def test_nothing_is_sent_where_that_would_be_no_gain(ranks, many, keys):
    samplers, calls = packed_together(ranks, many, **keys)
    assert calls == [0] * ranks
    assert all(sampler.plans == sampler_of(sampler.layout, **keys).plans for sampler in samplers)


def test_each_mini_batch_is_packed_once():
    packed = []

    def job(number):
        def pack():
            packed.append(number)
            return made[number].pack()

        return type(made[number])(made[number].num_samples, pack)

    made = []

    def keep(over_ranks, jobs):
        made[:] = jobs
        return over_ranks([job(number) for number in range(len(jobs))])

    barrier, told = Barrier(1), [None]
    layout = Layout(3, 1)
    told_by_others = InThreads(barrier, told, 0)
    with pytest.raises(AssertionError):  # the others say nothing, so that their cells do not exist
        sampler_of(layout, partial(keep, PackingOverRanks(layout, told_by_others, 1)), mini_batch_size=12)
    assert packed == [1, 4, 7]


def on_a_rank(rank):
    """(its plans and its shares, those that it makes alone)."""
    layout = Layout(3, rank)
    together = sampler_of(layout, PackingOverRanks(layout, GroupCollectives(torch.device("cpu")), 1), epochs=2)
    alone = sampler_of(layout, epochs=2)
    # A run that goes on plans again, perhaps on other ranks, and skips what was trained on.
    later = sampler_of(layout, epochs=2)
    later.load_state_dict({"iteration": 2, "consumed": 2})
    return together.plans == alone.plans, [s.micro_batches for s in together.remaining()][2:] == [
        s.micro_batches for s in later.remaining()
    ]


@pytest.mark.ranks
def test_processes_pack_for_each_other():
    assert run_on_ranks(3, on_a_rank) == [(True, True)] * 3
