"""Groups stay whole: one micro-batch holds all samples of a group, and every other law of the plan holds as before.

Groups are of any size, and their samples lie anywhere in the data.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.batching.collate import pack_rows
from rlmodule.batching.plan import PLANNERS, plan_batch
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.batching.shared_prompts import with_shared_prompts
from rlmodule.batching.workload import Workload
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, Sample, SampleMeta, TrainingSample


def metas_of(lengths, groups):
    """Samples of one prompt token; every response token has a loss."""
    return [SampleMeta(i, g, 1, n - 1, n - 1) for i, (n, g) in enumerate(zip(lengths, groups, strict=True))]


def by_group(metas, value):
    held = defaultdict(int)
    for m in metas:
        held[m.group_id] += value(m)
    return held


@st.composite
def batches(draw):
    samples = draw(st.lists(st.tuples(st.integers(2, 40), st.integers(-3, 12)), min_size=1, max_size=50))
    left_out = draw(st.sampled_from([0, 0, 3]))
    metas = metas_of(*zip(*samples, strict=True))
    metas = [replace(m, is_skipped=bool(left_out) and m.sample_id % left_out == 0) for m in metas]
    largest = max(by_group(metas, lambda m: 1).values())
    longest = max(by_group(metas, lambda m: m.length).values())
    return metas, {
        "mini_batch_size": draw(st.integers(largest, 60)),
        "dp_size": draw(st.integers(1, 6)),
        "token_budget": draw(st.integers(longest, longest + 100)),
        "planner": draw(st.sampled_from(PLANNERS)),
        "micro_batch_size": draw(st.none() | st.integers(largest, 2 * largest)),
        "order": draw(st.sampled_from(["largest_first", "balanced_ends"])),
        "multiple_of": draw(st.sampled_from([1, 3])),
        "seed": draw(st.integers(0, 3)),
        "keep_groups": True,
    }


def micro_batches(plan):
    return [m for rank in plan.micro_batches for m in rank]


@settings(max_examples=100, deadline=None)
@given(batches())
def test_no_group_is_split_and_every_sample_is_there_once_within_the_limits(batch):
    metas, choices = batch
    plans = plan_batch(metas, **choices)
    computed = [i for i, m in enumerate(metas) if not m.is_skipped]
    assert sorted(p for plan in plans for p in plan.positions) == computed
    homes = defaultdict(set)
    for number, plan in enumerate(plans):
        assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_steps}
        assert plan.num_micro_steps % choices["multiple_of"] == 0
        for where, micro_batch in enumerate(micro_batches(plan)):
            assert len(micro_batch) <= (choices["micro_batch_size"] or len(metas))
            if choices["micro_batch_size"] is None:
                assert sum(metas[p].length for p in micro_batch) <= choices["token_budget"]
            for p in micro_batch:
                homes[metas[p].group_id].add((number, where))
    assert all(len(places) == 1 for places in homes.values())


@settings(max_examples=40, deadline=None)
@given(batches())
def test_mini_batches_hold_whole_groups_and_count_them_whole(batch):
    """Left-out samples count too: the tokens of a group in the totals are all it has."""
    metas, choices = batch
    whole = by_group(metas, lambda m: m.loss_tokens)
    seen = set()
    for plan in plan_batch(metas, **choices):
        assert all(plan.totals.group_tokens[g] == whole[g] for g in plan.totals.group_tokens)
        assert not seen & set(plan.totals.group_tokens)
        seen |= set(plan.totals.group_tokens)
        assert len(plan.positions) + plan.num_skipped <= choices["mini_batch_size"]
    assert seen == set(whole)


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(1, 6))
def test_membership_does_not_depend_on_ranks_or_budget(batch, dp_size):
    metas, choices = batch
    other = {**choices, "dp_size": dp_size, "token_budget": choices["token_budget"] + 50}
    members = [[sorted(plan.positions) for plan in plan_batch(metas, **c)] for c in (choices, other)]
    assert members[0] == members[1]


@settings(max_examples=40, deadline=None)
@given(batches())
def test_groups_of_one_are_planned_as_samples_are(batch):
    metas, choices = batch
    alone = [replace(m, group_id=m.sample_id) for m in metas]
    assert plan_batch(alone, **choices) == plan_batch(alone, **{**choices, "keep_groups": False})


@pytest.mark.parametrize("planner", ["joint", "karmarkar_karp"])
def test_consecutive_groups_fill_a_mini_batch_while_they_fit(planner):
    """Sizes 2, 2, 3, 1 in steps of at most 4 samples, in the order in which the groups first appear."""
    metas = metas_of([5] * 8, [8, 8, 3, 1, 3, 1, 1, 0])
    plans = plan_batch(
        metas, mini_batch_size=4, dp_size=2, token_budget=20, planner=planner, keep_groups=True, cost=[1] * 8
    )
    assert [sorted(plan.positions) for plan in plans] == [[0, 1, 2, 4], [3, 5, 6, 7]]


def test_the_planner_balances_what_groups_cost_together():
    """Groups of 8+8, 9+1, 5+5 and 2+2 on two ranks: 16 + 4 against 10 + 10."""
    metas = metas_of([8, 8, 9, 1 + 1, 5, 5, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3])
    cost = [8, 8, 9, 1, 5, 5, 2, 2]
    [plan] = plan_batch(metas, mini_batch_size=8, dp_size=2, token_budget=40, cost=cost, keep_groups=True)
    assert sorted(sum(rank) for rank in plan.cost) == [20.0, 20.0]


@pytest.mark.parametrize("dp", [1, 3])
def test_a_shuffle_keeps_pairs_together_on_every_rank(dp):
    metas = metas_of([3 + 7 * i % 5 for i in range(24)], [i // 2 for i in range(24)])
    config = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=20, keep_groups=True)
    samplers = [BalancedSampler(metas, config, Layout(dp, rank), seed=1, iteration=2, epochs=2) for rank in range(dp)]
    assert all(sampler.plans == samplers[0].plans for sampler in samplers)
    assert len(samplers[0].plans) == 6
    for plan in samplers[0].plans:
        assert all({p ^ 1 for p in m} == set(m) for m in micro_batches(plan)), "the partner of 2k is 2k + 1"


@pytest.mark.parametrize(
    ("limits", "key", "says"),
    [
        ({"token_budget": 59}, "batching.max_token_len_per_gpu", "60 tokens of group 4 together, and 59 fit"),
        ({"mini_batch_size": 2}, "batching.mini_batch_size", "3 samples of group 4 together, and 2 fit"),
        ({"micro_batch_size": 2}, "batching.micro_batch_size_per_gpu", "3 samples of group 4 together, and 2 fit"),
    ],
)
def test_a_group_that_fits_nowhere_is_refused_with_numbers_and_a_remedy(limits, key, says):
    metas = metas_of([9, 20, 20, 20], [1, 4, 4, 4])
    with pytest.raises(ConfigError) as caught:
        plan_batch(metas, **{"mini_batch_size": 4, "dp_size": 2, "token_budget": 60, "keep_groups": True, **limits})
    assert caught.value.key == key
    assert says in str(caught.value)
    assert "batching.keep_groups=false" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(2, 30))
def test_a_shared_prompt_takes_its_room_once(batch, prompt_len):
    """The tokens that are laid out keep to a budget that holds the largest group with one prompt, and no more."""
    metas, choices = batch
    metas = [replace(m, prompt_len=prompt_len) for m in metas]
    longest = max(by_group(metas, lambda m: m.response_len).values()) + prompt_len
    choices = {**choices, "token_budget": longest, "micro_batch_size": None, "share_prompts": True}
    for plan in plan_batch(metas, **choices):
        for micro_batch in micro_batches(plan):
            rows = [TrainingSample(sample_like(metas[p])) for p in micro_batch]
            if rows:
                packed = pack_rows(rows, plan.totals, share_prompts=True)
                assert len(packed.input_ids) <= longest


def sample_like(meta):
    """A sample that says ``meta`` of itself; its prompt is that of its group."""
    prompt = Prompt(meta.group_id, (meta.group_id,) * meta.prompt_len, "")
    ids = torch.zeros(meta.response_len, dtype=torch.int64)
    return Sample(meta.sample_id, meta.group_id, prompt, ids, torch.ones_like(ids, dtype=torch.bool))


def test_shared_prompts_by_hand():
    """Groups a and b with prompts of 10 and 1 tokens: of a, the one that is left out neither brings nor takes.

    Without a model's shape a sample of L tokens costs 24576 L + L^2.
    """
    shapes = [(7, 10, 5, True), (7, 10, 5, False), (8, 1, 4, False), (7, 10, 3, False), (8, 1, 2, False)]
    metas = [SampleMeta(i, g, p, r, r, is_skipped=out) for i, (g, p, r, out) in enumerate(shapes)]
    length = np.array([m.length for m in metas])
    cost = Workload().cost(length, length)
    tokens, shared = with_shared_prompts(metas, np.array([0, 0, 1, 0, 1]), length, cost, Workload())
    assert tokens.tolist() == [15, 9 + 5, 5, 3, 3]
    assert (cost - shared).tolist() == [0, 0, 0, 24576 * 10 + 10**2, 0]


def test_the_remedy_is_per_device_where_sequence_ranks_share_a_micro_batch():
    with pytest.raises(ConfigError, match=r"max_token_len_per_gpu=25: .*51 tokens .* 50 fit\. Use 26 or more"):
        plan_batch(
            metas_of([25, 26], [0, 0]), mini_batch_size=2, dp_size=1, token_budget=50, sp_size=2, keep_groups=True
        )
