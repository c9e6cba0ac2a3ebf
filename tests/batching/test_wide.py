"""Laws of plans in which neighbouring ranks share rows; how good they are, on cases of the benchmark."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.batching.plan import MiniBatchPlan, plan_batch
from rlmodule.batching.row_sharing import exchange_of, with_shared_rows
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.batching.workload import Exchange, Workload
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout, widths_of
from rlmodule.core.slices import SlicePlace
from rlmodule.core.types import SampleMeta

ROOT = Path(__file__).parents[2]
CASES = {case["name"]: case for case in json.loads((ROOT / "benchmarks" / "planner_cases.json").read_text())["cases"]}
FREE = Workload(exchange=Exchange(overhead=0.0))


def metas_of(lengths, group_size=4):
    return [SampleMeta(i, i // group_size, 1, n - 1, n - 1) for i, n in enumerate(lengths)]


def cells_of(plan: MiniBatchPlan):
    """(micro-step, first rank, width, positions) of every row."""
    for step in range(plan.num_micro_steps):
        rank = 0
        while rank < len(plan.micro_batches):
            width = plan.width(rank, step)
            yield step, rank, width, plan.micro_batches[rank][step]
            rank += width


@st.composite
def heavy_tailed_batches(draw):
    dp_size = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    widest = draw(st.sampled_from(widths_of(dp_size)))
    budget = draw(st.integers(20, 60))
    some = st.integers(2, 20) | st.sampled_from([5, 20]) | st.integers(2, budget * widest)
    lengths = draw(st.lists(some, min_size=1, max_size=40))
    return metas_of(lengths), {
        "mini_batch_size": draw(st.integers(1, 50)),
        "dp_size": dp_size,
        "token_budget": budget,
        "widest": widest,
        "planner": draw(st.sampled_from(["joint", "joint_free"])),
        "multiple_of": draw(st.sampled_from([1, 1, 3])),
        "min_steps": draw(st.sampled_from([1, 1, 5])),
        "order": draw(st.sampled_from(["largest_first", "balanced_ends"])),
        "cost": draw(
            st.sampled_from([None, FREE, Workload(step_cost=1e5), [1.0 + i % 7 for i in range(len(lengths))]])
        ),
    }


@settings(max_examples=150, deadline=None)
@given(heavy_tailed_batches())
def test_every_sample_once_in_aligned_cells_within_the_budget_of_each_rank(batch):
    metas, choices = batch
    plans = plan_batch(metas, **choices)
    assert sorted(position for plan in plans for position in plan.positions) == list(range(len(metas)))
    for plan in plans:
        assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_steps}
        assert plan.num_micro_steps % choices["multiple_of"] == 0
        longest = 2
        for step, first, width, positions in cells_of(plan):
            assert width in widths_of(choices["widest"])
            assert first % width == 0
            for rank in range(first, first + width):
                assert plan.micro_batches[rank][step] == positions
                assert plan.width(rank, step) == width
                assert plan.cost[rank][step] == plan.cost[first][step]
            assert positions or width == 1, "a dummy is not shared"
            assert list(positions) == sorted(positions)
            tokens = sum(metas[position].length for position in positions)
            assert tokens <= width * choices["token_budget"]
            longest = max(longest, -(-tokens // width))
        assert plan.longest_row == longest


@settings(max_examples=80, deadline=None)
@given(heavy_tailed_batches())
def test_a_plan_is_never_worse_than_without_shared_rows_and_of_the_same_samples(batch):
    metas, choices = batch
    choices["token_budget"] = max(choices["token_budget"], *(meta.length for meta in metas))
    step_cost = choices["cost"].step_cost if isinstance(choices["cost"], Workload) else 0.0
    alone = plan_batch(metas, **{**choices, "widest": 1})
    for plan, before in zip(plan_batch(metas, **choices), alone, strict=True):
        assert plan.totals == before.totals
        assert sorted(plan.positions) == sorted(before.positions)
        total = [p.lockstep_cost + step_cost * p.num_micro_steps for p in (plan, before)]
        assert total[0] <= total[1] * (1 + 1e-12)
        assert plan.lockstep_efficiency <= 1 + 1e-9
        if plan.shared_rows == 0:
            assert plan == before, "to the digit"


def test_where_only_another_packing_saves_the_plan_is_the_one_without_shared_rows():
    """The search for shared rows finds 19 in two micro-steps that share nothing, where the other planner has 20 in one."""
    metas = metas_of([2] * 11 + [15])
    costs = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    choices = {"mini_batch_size": 9, "dp_size": 2, "token_budget": 20, "planner": "joint_free", "cost": costs}
    wide, alone = (plan_batch(metas, **choices, widest=widest)[0] for widest in (2, 1))
    assert wide.shared_rows == 0
    assert wide == alone


def test_where_ranks_are_level_the_plan_is_the_one_without_shared_rows():
    case = CASES["logn8k-256x8x4"]
    sizes = {name: case[name] for name in ("mini_batch_size", "dp_size", "token_budget")}
    metas = metas_of(case["lengths"])
    assert plan_batch(metas, **sizes, widest=8) == plan_batch(metas, **sizes)


@pytest.mark.parametrize("name", ["pareto32k-256x8x4", "pareto32k-1024x64x1", "pareto32k-1024x64x4"])
def test_heavy_tails_come_near_the_ideal(name):
    """``c`` = 0.03; the table of all cases is that of ``benchmarks/planner.py``."""
    case = CASES[name]
    metas, widest = metas_of(case["lengths"]), min(64, case["dp_size"])
    sizes = {key: case[key] for key in ("mini_batch_size", "dp_size", "token_budget")}
    plans = plan_batch(metas, **sizes, widest=widest, cost=Workload(exchange=Exchange(0.03, 0.03)))
    ideal = sum(24576 * n + n * n for n in case["lengths"]) / case["dp_size"]
    assert sum(plan.lockstep_cost for plan in plans) <= 1.05 * ideal
    alone = plan_batch(metas, **sizes)
    assert max(plan.longest_row for plan in plans) < max(plan.longest_row for plan in alone)


def test_a_shared_row_worked_by_hand():
    """One sample of 80 and four of 10 tokens, cost = length, four ranks: four share the long one at 20 % on top."""
    plan = plan_batch(
        metas_of([10, 80, 10, 10, 10]),
        mini_batch_size=5,
        dp_size=4,
        token_budget=20,
        widest=4,
        cost=Workload(exchange=Exchange(overhead=0.2)),
    )[0]
    assert [plan.micro_batches[rank][0] for rank in range(4)] == [(1,)] * 4
    assert plan.widths.tolist() == [[4, 1]] * 4
    assert sorted(plan.micro_batches[rank][1] for rank in range(4)) == [(0,), (2,), (3,), (4,)]
    long, short = 24576 * 80 + 80**2, 24576 * 10 + 10**2
    assert plan.lockstep_cost == pytest.approx(1.2 * long / 4 + short)
    assert plan.lockstep_efficiency == pytest.approx((long / 4 + short) / (1.2 * long / 4 + short))
    assert (plan.shared_rows, plan.longest_row, plan.rank_tokens) == (1, 20, (30,) * 4)
    assert plan.metrics["balance/peak_tokens"] == 20


def test_tokens_of_a_shared_row_add_up_to_those_of_the_mini_batch():
    """Two ranks share 7 tokens: three and a half each, which rounded would be 8."""
    plan = plan_batch(metas_of([7]), mini_batch_size=1, dp_size=2, token_budget=4, widest=2)[0]
    assert plan.rank_tokens == (3.5, 3.5)
    assert plan.metrics["global_seqlen/mean"] == plan.metrics["global_seqlen/balanced_max"] == 3.5


def test_an_exchange_that_costs_too_much_is_not_made():
    lengths = [40, 40, 40, 40, 60, 60]
    sizes = {"mini_batch_size": 6, "dp_size": 4, "token_budget": 60, "widest": 4}
    cheap, dear = (
        plan_batch(metas_of(lengths), **sizes, cost=Workload(exchange=Exchange(overhead)))[0] for overhead in (0.0, 9.0)
    )
    assert cheap.shared_rows > 0
    assert dear.shared_rows == 0


def test_between_nodes_the_other_overhead_counts():
    exchange = Exchange(overhead=0.1, across_nodes=0.5, node_size=4)
    assert exchange.share(np.array([1, 2, 4, 8])).tolist() == pytest.approx([1, 1.1 / 2, 1.1 / 4, 1.5 / 8])
    assert Exchange(0.1).share(np.array([8])).tolist() == pytest.approx([1.1 / 8])


def test_each_rank_of_a_cell_gets_its_slice_and_the_first_one_speaks_for_it():
    metas = metas_of([10, 80, 10, 10, 10, 45])
    config = BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=24, shuffle=False, max_sp_size=4)
    samplers = [
        BalancedSampler(metas, config, Layout(4, rank, max_sp_size=4, max_cp_size=2), seed=0, iteration=0)
        for rank in range(4)
    ]
    [plan] = samplers[0].plans
    shares = [sampler.shares(sampler.plans)[0] for sampler in samplers]
    for step, first, width, positions in cells_of(plan):
        for rank in range(first, first + width):
            assert shares[rank].micro_batches[step] == positions
            assert shares[rank].slices[step] == SlicePlace(width, rank - first, 2 if width == 4 else 1)
    owners, speakers = samplers[0].owners([plan], range(6)), samplers[0].speakers([plan], range(6))
    assert owners[1] == {0, 1, 2, 3}
    assert speakers == {position: min(ranks) for position, ranks in owners.items()}


def test_a_sample_that_not_even_the_widest_row_holds_is_refused():
    with pytest.raises(
        ConfigError, match=r"81 tokens .* holds 80 \(max_sp_size=4\).*Use 21 or more, raise max_sp_size"
    ):
        plan_batch(metas_of([81]), mini_batch_size=1, dp_size=4, token_budget=20, widest=4)
    with pytest.raises(ConfigError, match=r"keep_groups keeps the 84 tokens of group 0.*Use 21 or more"):
        plan_batch(metas_of([21] * 4), mini_batch_size=4, dp_size=4, token_budget=20, widest=4, keep_groups=True)


@pytest.mark.parametrize(
    ("config", "layout", "nodes", "message"),
    [
        ({}, Layout(), 1, "one process has nobody to share a row with"),
        ({}, Layout(4, sp_size=2), 1, "processes share more than rows"),
        ({}, Layout(4, tp_size=2), 1, "processes share more than rows"),
        ({}, Layout(4, pp_size=2), 1, "processes share more than rows"),
        ({}, Layout(4, ep_size=2), 1, "processes share more than rows"),
        ({}, Layout(4, sp_size=2, cp_size=2), 1, "processes share more than rows"),
        ({}, Layout(6), 1, r"neighbours of 6 processes.*Use one of \[1, 2\]"),
        ({}, Layout(6), 3, r"neighbours of 2 processes of a node.*Use one of \[1, 2\]"),
        ({"planner": "karmarkar_karp"}, Layout(4), 1, "joint and joint_free"),
        ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}, Layout(4), 1, "joint and joint_free"),
    ],
)
def test_what_shared_rows_cannot_go_with_is_refused_in_words(config, layout, nodes, message):
    with pytest.raises(ConfigError, match=f"batching.max_sp_size=4: .*{message}"):
        with_shared_rows(layout, BatchingConfig(max_sp_size=4, **config), nodes)


def test_rows_are_shared_within_a_node_unless_the_overhead_between_nodes_is_given():
    config = BatchingConfig(max_sp_size=4)
    assert with_shared_rows(Layout(8), config, 2).max_sp_size == 4
    with pytest.raises(ConfigError, match="of a node"):
        with_shared_rows(Layout(8), config, 4)
    far = BatchingConfig(max_sp_size=4, sp_overhead_across_nodes=0.25)
    assert with_shared_rows(Layout(8), far, 4).max_sp_size == 4
    assert exchange_of(Layout(8), far, 4) == Exchange(0.03, 0.25, node_size=2)
