"""Learning from pairs through whole runs: the starting policy is the reference, and is asked once about every sample.

The losses themselves are in ``losses/test_pairs.py``, the pairs in ``data/test_preferences.py``.
"""

import json
import math
from functools import partial

import pytest
import torch

from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.layout import Layout
from rlmodule.core.types import RewardResult, ScoredSample
from rlmodule.data.preferences import Pair
from rlmodule.data.stream import PromptStream
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.reference_cache import ReferenceLogprobCache
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.sources import OfflineSource, RowSampler
from rlmodule.experience.timer import Timer
from rlmodule.losses.dpo import DPO
from rlmodule.run.config import RunConfig
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import compose, run_small, small_run
from tests.helpers.tiny import sample, tiny_policy, wrap_here

SMALL = (
    "algorithm=dpo",
    "algorithm.train_batch_size=8",
    "model.architecture.num_key_value_heads=2",
    "warm_start.steps=0",
    "seed=3",
)
PAIRS = [Pair(sample(2 * i, 3, 2 + i), sample(2 * i + 1, 3, 5 - i)) for i in range(4)]


def steps(records, name):
    return [r.metrics[name] for r in records if r.kind == "step"]


def source_of(layout):
    rows = [(pair.chosen, pair.rejected) for pair in PAIRS]
    return OfflineSource(rows, (1.0, -1.0), RowSampler(PromptStream(4, seed=0), 3, lambda: layout))


def test_a_pair_is_a_group_of_a_chosen_and_a_rejected_sample():
    """Ids count what was drawn, so a pair that comes twice is two groups."""
    source = source_of(Layout())
    drawn = source.collect(0, Timer()) + source.collect(1, Timer())
    assert [s.sample.sample_id for s in drawn] == list(range(12))
    assert [s.sample.group_id for s in drawn] == [i // 2 for i in range(12)]
    assert [s.score.value for s in drawn] == [1.0, -1.0] * 6
    for chosen, rejected in zip(drawn[::2], drawn[1::2], strict=True):
        [pair] = [p for p in PAIRS if p.chosen.prompt is chosen.sample.prompt]
        assert (chosen.sample.response_ids is pair.chosen.response_ids) and (
            rejected.sample.response_ids is pair.rejected.response_ids
        )


def test_ranks_share_the_pairs():
    whole = source_of(Layout()).collect(0, Timer())
    parts = [s for rank in range(2) for s in source_of(Layout(2, rank)).collect(0, Timer())]
    assert sorted(s.sample.sample_id for s in parts) == [s.sample.sample_id for s in whole]


@pytest.mark.parametrize(("source", "column"), [("preferences", "good"), ("rollouts", "")])
def test_a_warm_start_on_pairs_imitates_what_was_chosen(source, column):
    words = ["data=files", "data.train_files=[pairs.jsonl]", "data.chosen_key=good", "warm_start.steps=9"]
    assert RunConfig.read(compose(*words, f"algorithm.source={source}")).for_warm_start().data.completion_key == column


def test_a_run_starts_at_its_reference_and_learns_to_tell_pairs_apart(tmp_path):
    """Policy and reference are alike at first: no margin, and log 2 to lose."""
    records = run_small(
        tmp_path, *SMALL, "loss.beta=0.5", "environment.test_size=32", "trainer.max_epochs=6", "optimizer.lr=3e-3"
    )
    losses, accuracies = steps(records, "actor/loss"), steps(records, "actor/pair_accuracy")
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert steps(records, "actor/margin")[0] == 0
    assert sum(losses[-4:]) / 4 < 0.6
    assert sum(accuracies[-4:]) / 4 > 0.7
    before, *_, after = [r.metrics for r in records if r.kind == "validation"]
    assert "val/accuracy" in after, "held-out prompts are answered"
    assert (before["val/margin"], before["val/pair_accuracy"]) == (0, 0)
    assert before["val/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert after["val/pair_accuracy"] > 0.6, "held-out pairs are told apart"
    assert after["val/loss"] < before["val/loss"]
    assert not [name for r in records for name in r.metrics if name.startswith("reward/")], "nothing was judged"


def test_pairs_of_own_answers_may_be_old_and_are_never_weighted(tmp_path):
    """Which of two responses is better does not depend on who drew them: replay needs no correction, only numbers."""
    online = ("algorithm.source=rollouts", "rollout.n=2", "rollout.staleness=1", "rollout_correction=observe")
    records = run_small(tmp_path, *SMALL, *online, "trainer.max_epochs=2")
    [first, second] = [r.metrics for r in records if r.kind == "iteration"]
    assert second["rollout/staleness/replayed"] == 0.5, "as many pairs of the iteration before"
    assert second["rollout_corr/k3_kl"] > 0, "the policy has learned since, and that is seen"
    for metrics in (first, second):
        assert metrics["rollout_corr/weight_min"] == metrics["rollout_corr/weight_max"] == 1, "and not made up for"


def test_a_resumed_run_learns_what_it_would_have_learned(tmp_path):
    """The reference is the policy of the first start, not the one of the checkpoint; its scores are made once more."""
    whole = run_small(tmp_path / "whole", *SMALL, "trainer.max_epochs=4")
    run_small(tmp_path / "cut", *SMALL, "trainer.max_epochs=2")
    resumed = run_small(tmp_path / "cut", *SMALL, "trainer.max_epochs=4", f"resume={tmp_path / 'cut'}")
    for name in ("actor/loss", "actor/margin", "actor/grad_norm"):
        assert steps(resumed, name) == pytest.approx(steps(whole, name), rel=1e-6), name
    assert len(steps(whole, "actor/loss")) == 8


def test_under_adapters_the_reference_is_the_model_without_them(tmp_path):
    pytest.importorskip("peft")
    records = run_small(tmp_path, *SMALL, "model.lora.r=4", "trainer.max_epochs=2")
    losses = steps(records, "actor/loss")
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[-1] != pytest.approx(math.log(2), rel=1e-6)


def fit(rank, folder, *overrides):
    torch.set_num_threads(1)
    run = small_run(folder, *SMALL, "trainer.max_epochs=2", *overrides)
    run.fit()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return [r.metrics for r in run_small(tmp_path_factory.mktemp("one"), *SMALL, "trainer.max_epochs=2")]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "shared", ["strategy.sp_size=1", "strategy.sp_size=2", "batching.max_sp_size=2 batching.max_token_len_per_gpu=40"]
)
def test_a_run_on_two_ranks_logs_the_same_numbers(tmp_path, expected, shared):
    """Data ranks, then ranks that hold half of every row each, then half of the rows that the plan says."""
    cut = ["strategy=ddp", "trainer.devices=2", "batching.max_token_len_per_gpu=64", *shared.split()]
    run_on_ranks(2, fit, tmp_path / "two", *cut)
    got = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        asked = {name: value for name, value in theirs.items() if name.startswith(("actor/", "train/", "val/"))}
        assert {name: mine[name] for name in asked} == pytest.approx(asked, rel=1e-4, abs=2e-6)
    assert any(mine.get("balance/shared_rows") for mine in got) == ("max_sp_size" in shared)


def score_twice(rank):
    """Reference log-probabilities of four pairs in two passes; in between the reference turns into another model."""
    reference = tiny_policy(seed=1).requires_grad_(False)
    strategy = wrap_here({"policy": tiny_policy(), "reference": reference})
    kept = ReferenceLogprobCache()
    objective = Objective(DPO(), AlgorithmConfig(source="preferences", loss_agg_mode="prompt-mean"))
    drawn = []
    for number in range(2):
        maker = ExperienceMaker(
            Scorer(strategy, objective, DynamicCollator(), torch.device("cpu"), reference_cache=kept),
            AdvantageStage(objective, GRPO(), strategy.collectives),
            lambda metas, number=number: BalancedSampler(
                metas,
                BatchingConfig(mini_batch_size=4, max_token_len_per_gpu=40, keep_groups=True),
                strategy.layout,
                seed=0,
                iteration=number,
            ),
        )
        layout = strategy.layout
        mine = [
            ScoredSample(s, RewardResult(value))
            for i, pair in enumerate(PAIRS)
            if (i + number) % layout.dp_size == layout.dp_rank
            for s, value in ((pair.chosen, 1.0), (pair.rejected, -1.0))
        ]
        rows = maker(partial(list, mine), Timer()).experience.rows
        drawn.append({r.sample.sample_id: r.ref_logprob.tolist() for r in rows.values()})
        for parameter in reference.parameters():
            parameter.zero_()
    return drawn


@pytest.mark.ranks
def test_the_reference_is_asked_once_whoever_asks_the_next_time():
    [(first, second)] = run_on_ranks(1, score_twice)
    assert second == first
    assert len(first) == 8
    firsts, seconds = zip(*run_on_ranks(2, score_twice), strict=True)
    for got in (firsts[0] | firsts[1], seconds[0] | seconds[1]):
        assert got.keys() == first.keys()
        assert all(got[i] == pytest.approx(first[i], abs=1e-5) for i in first)
