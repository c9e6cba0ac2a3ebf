"""Shared bug cases of the planner: numbers copied from the case list, id in each test's name."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlmodule.batching.equal_counts import top_up
from rlmodule.batching.partition import balanced_counts, karmarkar_karp
from rlmodule.batching.plan import PLANNERS, plan_batch
from rlmodule.core.types import SampleMeta
from rlmodule.experience.scoring import by_sample
from tests.helpers.tiny import sample

ROOT = Path(__file__).parents[2]


def metas_of(lengths, loss_tokens=None):
    return [SampleMeta(i, i, 0, n, n if loss_tokens is None else loss_tokens[i]) for i, n in enumerate(lengths)]


def sums(lengths, parts):
    return sorted((sum(lengths[item] for item in part) for part in parts), reverse=True)


@pytest.mark.parametrize("planner", PLANNERS)
def test_bat_03_every_rank_has_as_many_micro_batches(planner):
    """Four samples of 70 and two of 15 under a budget of 80: four cells are taken by the long ones."""
    lengths = [70, 70, 70, 70, 15, 15]
    plan = plan_batch(metas_of(lengths), mini_batch_size=6, dp_size=2, token_budget=80, planner=planner)[0]
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    assert max(sum(lengths[p] for p in m) for rank in plan.micro_batches for m in rank) <= 80
    assert plan.totals.tokens == sum(lengths)
    assert plan.totals.sequences == 6


def test_bat_03_a_rank_short_of_work_gets_dummies():
    """Five samples that cannot share a micro-batch take three micro-steps of two ranks: one cell stays empty."""
    plan = plan_batch(metas_of([70, 70, 70, 70, 15]), mini_batch_size=5, dp_size=2, token_budget=80)[0]
    assert plan.num_micro_steps == 3
    assert sum(not m for rank in plan.micro_batches for m in rank) == 1


@pytest.mark.parametrize("planner", PLANNERS)
def test_bat_04_fewer_sequences_than_ranks(planner):
    plan = plan_batch(metas_of([1, 2, 3]), mini_batch_size=3, dp_size=4, token_budget=8, planner=planner)[0]
    idle = [rank for rank in plan.micro_batches if not any(rank)]
    assert len(idle) == 1
    assert plan.totals.sequences == 3
    loss_sums = [2.0, 4.0, 6.0]
    assert sum(loss_sums[position] for position in plan.positions) / plan.totals.tokens == pytest.approx(2.0, abs=1e-5)


def test_bat_05_sequences_not_divisible_by_the_ranks():
    """BAT-05."""
    lengths = [9, 8, 7, 6, 5, 4, 3]
    parts = balanced_counts(lengths, 2)
    assert sorted(map(len, parts)) == [3, 4]
    assert sorted(item for part in parts for item in part) == list(range(7))
    high, low = sums(lengths, parts)
    assert high - low <= 9


def test_bat_06_padding_does_not_change_the_counts():
    """Sequence means 1, 2, 6 and a padding sample: (1+2+6)/3, not /4."""
    real = metas_of([4, 4, 4])
    padded = top_up(real, 4, 4)
    plan = plan_batch(padded, mini_batch_size=4, dp_size=2, token_budget=8)[0]
    assert plan.totals.sequences == 3
    assert plan.totals.tokens == 12
    assert plan.totals.group_tokens == {0: 4, 1: 4, 2: 4}
    means = dict(zip((m.sample_id for m in real), [1.0, 2.0, 6.0], strict=True))
    held = [padded[p] for p in plan.positions]
    assert sum(means.get(m.sample_id, 0.0) for m in held) / plan.totals.sequences == pytest.approx(3.0, abs=1e-5)


def test_bat_07_very_skewed_lengths():
    """BAT-07."""
    lengths = [1000, 10, 10, 10, 10, 10, 10, 10]
    assert sums(lengths, karmarkar_karp(lengths, 4)) == [1000, 30, 20, 20]
    assert sums(lengths, karmarkar_karp(lengths, 4, equal_size=True)) == [1010, 20, 20, 20]


def test_bat_07_the_long_sample_does_not_drag_short_ones_along():
    """BAT-07."""
    lengths = [1000, 10, 10, 10, 10, 10, 10, 10]
    plan = plan_batch(metas_of(lengths), mini_batch_size=8, dp_size=4, token_budget=2000, cost=lengths)[0]
    assert plan.lockstep_cost == 1000


def test_bat_08_ties_give_the_same_partition_and_plan_in_every_process():
    program = (
        "from rlmodule.batching.partition import karmarkar_karp\n"
        "from rlmodule.batching.plan import PLANNERS, plan_batch\n"
        "from rlmodule.core.types import SampleMeta\n"
        "print(karmarkar_karp([5] * 6, 3), karmarkar_karp([5] * 6, 3, equal_size=True))\n"
        "metas = [SampleMeta(i, i // 4, 1, i % 7 * 5 + 1, 1) for i in range(96)]\n"
        "for planner in PLANNERS:\n"
        "    print(plan_batch(metas, mini_batch_size=32, dp_size=4, token_budget=64, planner=planner))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "2")
    ]
    printed = {process.communicate(timeout=120)[0] for process in processes}
    assert len(printed) == 1
    assert printed.pop().count("MiniBatchPlan(") == 9
    for equal_size in (False, True):
        parts = karmarkar_karp([5] * 6, 3, equal_size)
        assert sums([5] * 6, parts) == [10, 10, 10]
        assert sorted(item for part in parts for item in part) == list(range(6))


def test_bat_09_differencing_is_better_than_greedy_and_not_optimal():
    """BAT-09."""
    lengths = [8, 7, 6, 5, 4]
    high, low = sums(lengths, karmarkar_karp(lengths, 2))
    greedy = [0, 0]
    for n in lengths:
        greedy[greedy.index(min(greedy))] += n
    best = min(abs(30 - 2 * sum(some)) for k in range(6) for some in itertools.combinations(lengths, k))
    assert (high - low, max(greedy) - min(greedy), best) == (2, 4, 0)
    assert high - low <= max(lengths)


def test_bat_11_outputs_come_back_in_input_order():
    """Position 4 is a padding sample without loss tokens, so a forward pass gives it no value. Samples 2 and 3 are longer."""
    masks = ([True], [True], [True, False, True], [True, True])
    samples = {p: sample(p, response_len=len(mask), loss_mask=mask) for p, mask in enumerate(masks)}
    outputs = {}
    for positions, said in (((2, 0), [20.0, 21.0, 0.0]), ((3, 4, 1), [30.0, 31.0, 10.0])):
        outputs |= by_sample(torch.tensor(said), positions, samples)
    assert [outputs[p].tolist() for p in range(4)] == [[0], [10], [20, 0, 21], [30, 31]]
