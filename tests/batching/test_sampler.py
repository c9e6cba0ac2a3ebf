"""Mini-batches are drawn from a seeded order that no rank has a say in; every rank gets its share of the same plan.

How a plan is made is in ``test_plan.py``.
"""

import itertools
from dataclasses import replace

import pytest

from rlmodule.batching.sampler import BalancedSampler, BatchingConfig, sample_order
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.types import SampleMeta

METAS = [SampleMeta(i, i // 2, 2 + i % 3, 1 + (7 * i) % 11, 1 + (7 * i) % 11) for i in range(30)]


def sampler_of(config=None, *, metas=METAS, dp=1, rank=0, **keys):
    config = config or BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=32)
    return BalancedSampler(metas, config, Layout(dp, rank), **{"seed": 3, "iteration": 5, **keys})


def members(plan):
    return frozenset(plan.positions)


def test_the_order_is_a_permutation_keyed_by_seed_iteration_and_epoch():
    orders = {key: tuple(sample_order(50, *key)) for key in itertools.product((0, 1), (0, 1), (0, 1))}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == 8
    assert tuple(sample_order(50, 0, 1, 0)) == orders[0, 1, 0]
    assert sample_order(4, 0, 0, 0, shuffle=False).tolist() == [0, 1, 2, 3]
    assert sorted(sample_order(7, -1, 0, 0)) == list(range(7)), "a negative seed is a seed"


@pytest.mark.parametrize("planner", ["joint", "karmarkar_karp"])
def test_which_samples_share_a_step_does_not_depend_on_the_ranks_or_the_budget(planner):
    seen = {
        tuple(
            members(plan)
            for plan in sampler_of(
                BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=b, planner=planner), dp=dp
            ).plans
        )
        for dp in (1, 2, 3, 8)
        for b in (16, 64, 10_000)
    }
    [steps] = seen
    assert [len(step) for step in steps] == [8, 8, 8, 6], "the last, incomplete mini-batch is used"


def test_every_epoch_holds_every_sample_once_in_a_new_order():
    sampler = sampler_of(epochs=3)
    assert len(sampler) == 12
    epochs = [sampler.plans[i : i + 4] for i in (0, 4, 8)]
    for plans in epochs:
        assert sorted(p for plan in plans for p in plan.positions) == list(range(30))
    assert len({tuple(members(plan) for plan in plans) for plans in epochs}) == 3
    assert sampler.first_pass == tuple(epochs[0])


def test_without_a_shuffle_samples_come_as_they_were():
    plans = sampler_of(BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=64, shuffle=False)).plans
    assert [sorted(plan.positions) for plan in plans] == [list(range(i, min(i + 8, 30))) for i in range(0, 30, 8)]


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_the_shares_of_all_ranks_make_the_plan(dp):
    ranks = [sampler_of(dp=dp, rank=rank) for rank in range(dp)]
    for shares, plan in zip(zip(*ranks, strict=True), ranks[0].plans, strict=True):
        assert tuple(share.micro_batches for share in shares) == plan.micro_batches
        assert len({len(share.micro_batches) for share in shares}) == 1, "lock-step"
        assert all(share.totals == plan.totals and share.metrics == plan.metrics for share in shares)
        assert plan.totals.dp_size == dp
        assert plan.totals.tokens == sum(METAS[p].loss_tokens for p in plan.positions)


def test_owners_say_who_runs_what():
    sampler = sampler_of(dp=3, epochs=2)
    owners = sampler.owners(sampler.plans, range(30))
    assert sorted(owners) == list(range(30))
    for rank in range(3):
        mine = {p for plan in sampler.plans for step in plan.micro_batches[rank] for p in step}
        assert mine == {p for p, ranks in owners.items() if rank in ranks}
    assert all(len(ranks) == 1 for ranks in sampler.owners(sampler.first_pass, range(30)).values())


def test_a_saved_state_goes_on_after_what_was_handed_out():
    whole = list(sampler_of(epochs=2))
    first = sampler_of(epochs=2)
    taken = list(itertools.islice(first, 3))
    second = sampler_of(epochs=2)
    second.load_state_dict(first.state_dict())
    rest = list(itertools.islice(second, 2))
    third = sampler_of(epochs=2)
    third.load_state_dict(second.state_dict())
    assert taken + rest + list(third) == whole
    assert third.state_dict() == {"iteration": 5, "consumed": len(whole)}


def test_iterating_again_after_the_end_starts_anew():
    sampler = sampler_of()
    assert list(sampler) == list(sampler)


def test_the_state_of_another_iteration_is_our_own_bug():
    with pytest.raises(AssertionError, match="state of iteration 4, not 5"):
        sampler_of().load_state_dict({"iteration": 4, "consumed": 1})


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_equal_counts_top_up_with_positions_that_no_sample_stands_for(dp):
    """30 samples on a multiple of 8: two padding samples, at positions past the samples."""
    config = BatchingConfig(mini_batch_size=8, equal_counts=True, planner="karmarkar_karp", max_token_len_per_gpu=64)
    plans = sampler_of(config, dp=dp).plans
    held = [p for plan in plans for p in plan.positions]
    assert sorted(held) == list(range(32))
    for plan in plans:
        assert {sum(len(step) for step in rank) for rank in plan.micro_batches} == {8 // dp}
        assert plan.totals.sequences == sum(p < 30 for p in plan.positions), "padding samples count nowhere"


def test_a_fixed_number_of_samples_per_micro_batch():
    config = BatchingConfig(mini_batch_size=8, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    for plan in sampler_of(config, dp=2).plans:
        assert all(len(step) <= 2 for rank in plan.micro_batches for step in rank)
        assert plan.num_micro_steps == 2


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"mini_batch_size": 0}, "mini_batch_size"),
        ({"max_token_len_per_gpu": 1}, "max_token_len_per_gpu"),
        ({"planner": "best"}, "planner"),
        ({"order": "random"}, "order"),
        ({"use_dynamic_bsz": False}, "micro_batch_size_per_gpu"),
        ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 0}, "micro_batch_size_per_gpu"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys, key):
    with pytest.raises(ConfigError) as caught:
        BatchingConfig(**keys)
    assert caught.value.key == key


def test_a_pipeline_has_four_micro_steps_for_each_stage_where_samples_suffice():
    def steps(config, size, **sizes):
        sampler = BalancedSampler(METAS, config, Layout(size, **sizes), seed=3, iteration=5)
        return [plan.num_micro_steps for plan in sampler.plans]

    ample = BatchingConfig(mini_batch_size=15, max_token_len_per_gpu=10_000)
    assert steps(ample, 1) == [1, 1]
    assert steps(ample, 2, pp_size=2) == [8, 8]
    assert steps(ample, 4, pp_size=2) == [8, 8], "15 samples over two ranks leave one dummy"
    assert steps(ample, 4, pp_size=4) == [15, 15], "of the 16 asked for"
    assert steps(replace(ample, min_micro_steps=3), 2, pp_size=2) == [3, 3]
    assert steps(replace(ample, min_micro_steps=3), 1) == [3, 3]
    fixed = replace(ample, use_dynamic_bsz=False, micro_batch_size_per_gpu=5)
    assert steps(fixed, 2, pp_size=2) == [3, 3], "the number of samples is what was asked for"


def test_bad_floor_is_refused():
    with pytest.raises(ConfigError, match="min_micro_steps"):
        BatchingConfig(min_micro_steps=0)
