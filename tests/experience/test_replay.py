"""Replay: old responses are trained on again while they are young enough, with weights; nothing else changes."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, RewardResult, Sample, ScoredSample
from rlmodule.data.stream import PromptStream
from rlmodule.experience.collect import Collected
from rlmodule.experience.gathering import gather_sample_info
from rlmodule.experience.replay import ReplayMemory
from rlmodule.experience.sources import RolloutSource, RowSampler
from rlmodule.records.metrics_log import read_records
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import (
    MADE_OF_THE_LAYOUT,
    MADE_OF_TIME,
    STEPS_PER_ITERATION,
    numbers,
    rollouts,
    run_small,
    small_run,
)
from tests.helpers.tiny import single

STALE = ("rollout.staleness=2", "algorithm.rollout_correction.mode=truncate")
SAMPLES = 16  # of an iteration


def drawn(iteration, count=2):
    ids = range(iteration * count, (iteration + 1) * count)
    one = torch.ones(1, dtype=torch.int64)
    return [
        ScoredSample(Sample(i, i, Prompt(0, (1,), ""), one, one.bool(), version=iteration), RewardResult(1.0))
        for i in ids
    ]


def ids_of(scored):
    return [s.sample.sample_id for s in scored]


def test_a_response_is_kept_for_as_many_iterations_as_asked():
    memory = ReplayMemory(2)
    seen = [ids_of(memory.with_earlier(drawn(i), i)) for i in range(5)]
    assert seen == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 8, 9]]


def test_no_staleness_keeps_nothing():
    memory = ReplayMemory(0)
    assert [ids_of(memory.with_earlier(drawn(i), i)) for i in range(2)] == [[0, 1], [2, 3]]
    assert memory.state() is None


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_takes_up_what_two_kept(ranks):
    saved = [ReplayMemory(1), ReplayMemory(1)]
    for rank, memory in enumerate(saved):
        memory.with_earlier(drawn(0, 6)[rank::2], 0)
    states = [memory.state() for memory in saved]
    shares = [ReplayMemory(1) for _ in range(ranks)]
    for rank, memory in enumerate(shares):
        memory.load(states, Layout(ranks, rank))
    kept = [ids_of(memory.with_earlier([], 1)) for memory in shares]
    assert sorted(i for part in kept for i in part) == list(range(6))
    assert max(map(len, kept)) - min(map(len, kept)) <= 1


def drawn_by(source, iteration):
    """This rank's responses of an iteration, as an engine would have drawn them."""
    one = torch.ones(1, dtype=torch.int64)
    return [
        ScoredSample(Sample(r.sample_id, r.group_id, r.row, one, one.bool(), version=iteration), RewardResult(1.0))
        for r in source.requests()
    ]


def part_of_run(seed, n, staleness, ranks):
    """(stream, source, memory) of each rank."""
    streams = [PromptStream(7, seed) for _ in range(ranks)]
    draws = [RowSampler(stream, 4, partial(Layout, ranks, rank)) for rank, stream in enumerate(streams)]
    prompts = [Prompt(i, (1,), "") for i in range(7)]
    sources = [RolloutSource(prompts, draw, n, None, None, None, 0) for draw in draws]
    return streams, sources, [ReplayMemory(staleness, n) for _ in range(ranks)]


@settings(max_examples=50, deadline=None)
@given(
    staleness=st.integers(0, 3),
    rounds=st.lists(st.integers(1, 3), min_size=2, max_size=6),
    cut=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 2)),
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_no_two_samples_of_an_iteration_have_the_same_id(staleness, rounds, cut, sizes, ranks):
    """Fresh ones beside old ones, rounds that replace dropped groups, and a resume on other ranks with more each."""
    n, more = sizes
    streams, sources, memories = part_of_run(1, n, staleness, ranks[0])
    for iteration, times in enumerate(rounds):
        if iteration == cut:
            kept, consumed = [m.state() for m in memories], streams[0].state_dict()
            streams, sources, memories = part_of_run(1, n + more, staleness, ranks[1])
            for rank, (stream, memory) in enumerate(zip(streams, memories, strict=True)):
                stream.load_state_dict(consumed)
                memory.load(kept if staleness else [], Layout(ranks[1], rank))
        everyone = []
        for source, memory in zip(sources, memories, strict=True):
            fresh = [s for _ in range(times) for s in drawn_by(source, iteration)]
            everyone += memory.with_earlier(fresh, iteration)
        info = gather_sample_info(lambda found=everyone: found, single({}).collectives)[1]
        assert len(set(info.metas.sample_id.tolist())) == len(everyone)
        Collected([], info.where(info.reward > 2), {}, info)  # says the same of what stays and of what is left out


def test_a_sample_that_comes_twice_is_no_iteration():
    info = gather_sample_info(lambda: drawn(0), single({}).collectives)[1]
    for stays, goes in (([0, 1, 0], []), ([1], [0, 1])):
        with pytest.raises(AssertionError, match=f"have the id {stays[0]}"):
            Collected([], info.take(np.array(stays)), {}, info.take(np.array(goes, int)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four iterations; from the third on each trains on the two before as well."""
    run_dir = tmp_path_factory.mktemp("whole")
    return run_dir, run_small(run_dir, *STALE, "trainer.max_epochs=4")


def test_every_iteration_trains_on_those_before_it(whole):
    iterations = [r for r in whole[1] if r.kind == "iteration"]
    assert [r.step for r in iterations] == [STEPS_PER_ITERATION * n for n in (1, 3, 6, 9)]
    ages = [[r.metrics.get(f"rollout/staleness/{name}") for name in ("max", "replayed")] for r in iterations]
    assert ages[0] == [None, None]
    assert ages[1:] == [[1.0, 0.5], [2.0, pytest.approx(2 / 3)], [2.0, pytest.approx(2 / 3)]]
    assert [r.metrics["progress/samples"] for r in iterations] == [SAMPLES * n for n in (1, 2, 3, 4)]
    assert all("rollout_corr/ess" in r.metrics for r in iterations)


def test_rewards_and_files_are_of_what_was_drawn_last(whole):
    """What the files hold is what the curve shows, and no response is written twice."""
    run_dir, records = whole
    iterations = [r for r in records if r.kind == "iteration"]
    seen = set()
    for record, rows in zip(iterations, rollouts(run_dir).values(), strict=True):
        assert len(rows) == SAMPLES
        assert record.metrics["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / SAMPLES)
        seen |= {row["sample_id"] for row in rows}
    assert len(seen) == 4 * SAMPLES


def test_old_responses_are_weighted_and_fresh_ones_are_not(tmp_path):
    """With bounds that nothing reaches the weight is the ratio: 1 up to rounding where all is fresh."""
    records = run_small(tmp_path / "run", *STALE, "algorithm.rollout_correction.upper=1e6", "trainer.max_epochs=3")
    fresh, mixed, _ = (r.metrics for r in records if r.kind == "iteration")
    assert abs(fresh["rollout_corr/kl"]) < 1e-5
    assert abs(mixed["rollout_corr/k3_kl"]) > 1e-6


def test_it_goes_on_as_if_never_stopped(whole, tmp_path):
    run_small(tmp_path / "cut", *STALE, "trainer.max_epochs=3")
    resumed = run_small(tmp_path / "cut", *STALE, "trainer.max_epochs=4", f"resume={tmp_path / 'cut'}")
    steps = [[n for n in numbers(records) if n[0] != "validation"] for records in (whole[1], resumed)]
    assert steps[0] == steps[1]


def test_another_number_of_responses_is_refused_while_earlier_ones_are_kept(tmp_path):
    """Sample ids are made of it: new responses would have the ids of those that are trained on again."""
    run_small(tmp_path / "cut", *STALE, "trainer.max_epochs=3")
    on = ("trainer.max_epochs=4", "rollout.n=2", f"resume={tmp_path / 'cut'}")
    with pytest.raises(ConfigError, match=r"^rollout\.n=2: .* were drawn with 4, .* Use rollout\.n=4"):
        run_small(tmp_path / "cut", *STALE, *on)
    run_small(tmp_path / "cut", *on)


@pytest.mark.ranks
def test_ranks_change_nothing(whole, tmp_path):
    run_on_ranks(2, partial(_fit, tmp_path / "shared"))
    without = (*MADE_OF_TIME, *MADE_OF_THE_LAYOUT)
    for got, expected in zip(
        numbers(read_records(tmp_path / "shared" / "metrics.jsonl"), without=without),
        numbers(whole[1], without=without),
        strict=True,
    ):
        assert got[:2] == expected[:2]
        assert got[2] == pytest.approx(expected[2], rel=1e-3, abs=1e-5, nan_ok=True)


def _fit(run_dir, rank):
    run = small_run(run_dir, *STALE, "trainer.max_epochs=4", "trainer.devices=2", "strategy=ddp")
    run.fit()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.rollout_correction.mode=none"], "nothing corrects for what was learned since"),
        (["algorithm.rollout_correction.mode=observe"], "Use algorithm.rollout_correction.mode=truncate"),
        (["algorithm.filter_groups.enable=true"], "old ones would count among them"),
        (["trainer.max_epochs=2"], "the run has 2 iterations. Use rollout.staleness=1 or less"),
        (["algorithm=sft", "algorithm.rollout_correction.mode=none"], "nothing is sampled here"),
        (["rollout.staleness=-1"], "must be at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=r"^rollout\.staleness=") as caught:
        small_run(tmp_path / "run", *STALE, "trainer.max_epochs=4", *overrides)
    assert says in str(caught.value)
