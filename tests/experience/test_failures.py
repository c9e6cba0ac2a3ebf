"""What failures of a reward function do, whichever rank they happen on: counted, said once, and no part of the reward."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from rlmodule.advantages.gdpo import GDPO
from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.algorithm.shaping import FilterGroups
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import RewardResult, ScoredSample
from rlmodule.data.stream import PromptStream
from rlmodule.datamodule import RLDataModule
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.iteration_metrics import reward_metrics
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.timer import Timer
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.rewards.countdown import Countdown
from rlmodule.rewards.function import Function
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import sample, tiny_policy, wrap_here


def good(value, **parts):
    return RewardResult(value, parts, counts={"failed": 0.0, "timed_out": 0.0})


def bad(reason="broken", timed_out=0.0):
    return RewardResult(None, counts={"failed": 1.0, "timed_out": timed_out}, failure=reason)


def scored(results, size=2):
    """Groups of ``size``."""
    return [ScoredSample(sample(i, group=i // size), result) for i, result in enumerate(results)]


def maker_of(advantage=None, **algorithm):
    strategy = wrap_here({"policy": tiny_policy()})
    objective = Objective(PPOClip(), AlgorithmConfig(**algorithm))
    return ExperienceMaker(
        Scorer(strategy, objective, DynamicCollator(), torch.device("cpu")),
        AdvantageStage(objective, advantage or GRPO(), strategy.collectives),
        lambda metas: BalancedSampler(metas, BatchingConfig(), strategy.layout, seed=0, iteration=0),
    )


def iterate(rank, results, **options):
    """(advantages, metrics, failure texts by sample id) or the error's words, on one of the ranks."""
    maker = maker_of(**options)
    layout = maker.scorer.strategy.layout
    try:
        iteration = maker(lambda: scored(results)[layout.dp_rank :: layout.dp_size], Timer())
    except TrainingError as error:
        return str(error)
    failures = {info.meta.sample_id: info.failure for info in iteration.sample_info if info.failure is not None}
    return iteration.advantages.tolist(), dict(iteration.metrics), failures


# ---- components


def test_gdpo_learns_from_a_plain_function(tmp_path):
    """Issue 10, point 7: a function that returns a number has no components, so the reward itself counts as one."""
    (tmp_path / "code.py").write_text("def score(response, **row): return float(response)")
    reward = Function(f"{tmp_path / 'code.py'}:score", num_workers=1)
    values = [1.0, 0.0, 0.5, 0.5]
    results = reward([replace(sample(0), text=str(value)) for value in values])
    advantages, _, _ = iterate(0, results, advantage=GDPO())
    assert advantages[0] > 0 > advantages[1]
    assert advantages[2:] == [0, 0]


def test_gdpo_reads_the_score_of_countdown_and_not_whether_it_is_valid():
    """Issue 10, point 7."""
    prompt = replace(sample(0).prompt, answer="8", meta={"numbers": [3, 7, 2]})
    texts = ("3+7-2", "3+7+2")  # both are valid, one hits the target
    results = Countdown()([replace(sample(0), prompt=prompt, text=text) for text in texts])
    assert [result.diagnostics["valid"] for result in results] == [1, 1]
    advantages, _, _ = iterate(0, results, advantage=GDPO())
    assert advantages[0] > 0 > advantages[1]


def test_gdpo_reads_declared_components_alone():
    results = [
        RewardResult(1.0, {"a": 1.0}, diagnostics={"noise": 5.0}),
        RewardResult(1.0, {"a": 0.0}, diagnostics={"noise": -5.0}),
    ]
    silent = [RewardResult(r.value, r.parts) for r in results]
    assert iterate(0, results, advantage=GDPO())[0] == iterate(0, silent, advantage=GDPO())[0]


# ---- counts


MIXED = [good(1.0), bad("first:\nValueError"), good(0.0), bad("second", timed_out=1.0), bad("third"), good(0.5)]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_failed_samples_are_counted_on_any_number_of_ranks(world_size):
    """Issue 10, point 7: a failed sample is unscored, and still counts in ``reward/failed``."""
    work = partial(iterate, results=MIXED)
    for _, metrics, failures in [work(0)] if world_size == 1 else run_on_ranks(world_size, work):
        assert (metrics["reward/failed"], metrics["reward/timed_out"]) == (3, 1)
        assert sorted(failures) == [1, 3, 4]
        assert failures[1] == "first:\nValueError", "one text of each rank is kept"


def test_failed_samples_count_where_groups_are_left_out():
    """Also those of groups that were replaced."""
    rounds = iter([[bad(), good(0.0), good(1.0), good(1.0)], [good(0.0), good(1.0), bad(), good(0.0)]])
    maker = maker_of(filter_groups=FilterGroups(enable=True, max_num_gen_batches=2))
    count = iter(range(0, 100, 4))

    def collect():
        first = next(count)
        return [ScoredSample(sample(first + i, group=(first + i) // 2), r) for i, r in enumerate(next(rounds))]

    iteration = maker(collect, Timer())
    assert iteration.metrics["reward/failed"] == 2
    assert len(iteration.sample_info) == 2, "one group of four tells anything"


def test_a_component_of_the_name_of_a_count_keeps_its_own_metric():
    results = [good(1.0, failed=4.0), good(0.0, failed=2.0)]
    iteration = maker_of()(lambda: scored(results), Timer())
    assert reward_metrics(iteration.sample_info)["reward/failed_part"] == 3
    assert iteration.metrics["reward/failed"] == 0


def test_rewards_that_count_nothing_log_no_counts():
    _, metrics, _ = iterate(0, [RewardResult(1.0), RewardResult(0.0)])
    assert not [name for name in metrics if name.startswith("reward/")]


# ---- the end of a run


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_whose_own_samples_all_failed_goes_on(world_size):
    """Issue 10, point 7: every second sample fails, so on two ranks one rank has nothing else."""
    results = [good(1.0), bad(), good(0.0), bad()]
    work = partial(iterate, results=results)
    for outcome in [work(0)] if world_size == 1 else run_on_ranks(world_size, work):
        assert not isinstance(outcome, str), outcome
        assert outcome[1]["reward/failed"] == 2


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_when_every_sample_of_the_iteration_failed_the_run_ends_on_every_rank(world_size):
    work = partial(iterate, results=[bad(f"sample {i}:\nreason {i}") for i in range(4)])
    for outcome in [work(0)] if world_size == 1 else run_on_ranks(world_size, work):
        assert outcome == ("the reward failed on all 4 responses of the iteration. The first is sample 0:\nreason 0")


def test_filtered_rounds_are_one_iteration():
    """A round in which all failed ends nothing, for another may follow."""
    rounds = iter([[bad(), bad()], [good(0.0), good(1.0)]])
    maker = maker_of(filter_groups=FilterGroups(enable=True, max_num_gen_batches=2))
    count = iter(range(0, 100, 2))

    def collect():
        first = next(count)
        return [ScoredSample(sample(first + i, group=first // 2), r) for i, r in enumerate(next(rounds))]

    assert maker(collect, Timer()).metrics["reward/failed"] == 2


class Source:
    """The same results in every iteration."""

    has_rewards, is_fresh = True, True

    def __init__(self, results):
        self.results = results

    def collect(self, iteration, timer):
        return scored(self.results)


def test_failures_are_said_once_with_the_first_error():
    """Issue 10, point 20: with the row, by the first iteration that has any."""
    datamodule = RLDataModule(Source([good(1.0), good(0.0)]), PromptStream(4, seed=0), lambda iteration: maker_of())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        datamodule.train_dataloader()
        datamodule.source.results = [good(1.0), bad("sample 1 (rows.jsonl:5, response 'x'):\nValueError: no")]
        for _ in range(3):
            datamodule.iteration.sampler.consumed = 1
            datamodule._begun_at = 0
            datamodule.train_dataloader()
    [warning] = [str(w.message) for w in caught]
    assert warning == (
        "the reward failed on 1 of 2 responses; they are unscored and counted in reward/failed, and this is not said "
        "again. The first is sample 1 (rows.jsonl:5, response 'x'):\nValueError: no"
    )
