"""Responses become rows ready to train on: facts known to all, samples where they train, the first ratio exactly 1.

Where responses come from is in ``rollout/`` and ``data/``; what is done with the rows in ``test_update.py``.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch

from rlmodule.advantages.grpo import GRPO
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.errors import RLModuleError, TrainingError
from rlmodule.core.types import Score, ScoredSample
from rlmodule.experience import ExperienceMaker, Stopwatch, gather_facts
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.sft import SFT
from rlmodule.objective import AlgorithmConfig, Objective
from strategies.parts.mesh import current_layout
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import Stepper, ddp, sample, single, tiny_policy

CPU = torch.device("cpu")
BUDGET = BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=16)
# Groups of three; the fifth sample cannot be scored, the third group is flat.
REWARDS = [1.0, 0.0, 0.0, 0.5, None, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.25]
COMPUTED = [i for i, reward in enumerate(REWARDS) if reward is not None]


def scored_samples():
    lengths = [(3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2), (4, 4), (2, 7), (1, 1), (5, 5)]
    return [
        ScoredSample(sample(i, prompt, response, group=i // 3), Score(REWARDS[i], {"bonus": float(i)}))
        for i, (prompt, response) in enumerate(lengths)
    ]


def maker_of(strategy, *, loss=None, config=BUDGET, epochs=1, use_kl_loss=False):
    objective = Objective(loss or PPOClip(), AlgorithmConfig(use_kl_loss=use_kl_loss))
    return ExperienceMaker(
        strategy,
        objective,
        GRPO(),
        DynamicCollator(),
        lambda metas: BalancedSampler(metas, config, strategy.layout, seed=0, iteration=0, epochs=epochs),
        CPU,
    )


def make(rank, *, epochs=1, use_kl_loss=False):
    """What one rank holds of an iteration whose responses were drawn on all ranks in turn."""
    layout = current_layout()
    models = {"policy": tiny_policy()}
    if use_kl_loss:
        models["reference"] = tiny_policy(seed=1).requires_grad_(False)
    strategy = (single if layout.world_size == 1 else ddp)(models)
    mine = scored_samples()[layout.dp_rank :: layout.dp_size]
    iteration = maker_of(strategy, epochs=epochs, use_kl_loss=use_kl_loss)(lambda: mine, Stopwatch())
    rows = {
        position: (
            row.sample.sample_id,
            float(row.advantage[0]),
            row.old_logprob.numpy().copy(),
            None if row.ref_logprob is None else row.ref_logprob.numpy().copy(),
        )
        for position, row in iteration.experience.rows.items()
    }
    trains = {p for plan in iteration.sampler.plans for step in plan.micro_batches[layout.dp_rank] for p in step}
    assert set(rows) == trains, "a rank holds what it trains on, and nothing else"
    return rows, [f.meta for f in iteration.facts], iteration.advantages.tolist()


def test_one_rank_holds_every_sample_with_its_scores():
    rows, metas, advantages = make(0, use_kl_loss=True)
    assert sorted(rows) == COMPUTED, "with a KL term also the flat group"
    assert [meta.sample_id for meta in metas] == list(range(12))
    for position, (sample_id, advantage, old, reference) in rows.items():
        assert sample_id == position
        assert advantage == pytest.approx(advantages[position], rel=1e-6)
        if REWARDS[position] is not None:
            assert (old < 0).all()
            assert (reference < 0).all()
            assert not np.array_equal(old, reference)


def test_advantages_are_those_of_the_groups():
    """By hand, group 1 0 0: mean 1/3, standard deviation 1/sqrt(3); unscored and flat ones get 0."""
    _, metas, advantages = make(0)
    assert advantages[0] == pytest.approx((2 / 3) / (1 / math.sqrt(3) + 1e-6))
    assert advantages[4] == 0
    assert advantages[6:9] == [0, 0, 0]
    assert metas[4].loss_tokens == 0, "a sample without a verdict leaves the loss"


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("epochs", [1, 2])
def test_ranks_share_the_samples_and_know_the_same_facts(world_size, epochs):
    expected, metas, advantages = make(0, use_kl_loss=True)
    ranks = run_on_ranks(world_size, partial(make, epochs=epochs, use_kl_loss=True))
    holders = {}
    for rank, (rows, known, computed) in enumerate(ranks):
        assert known == metas
        assert computed == advantages
        for position, (sample_id, advantage, old, reference) in rows.items():
            holders.setdefault(position, set()).add(rank)
            assert sample_id == expected[position][0]
            assert advantage == expected[position][1]
            np.testing.assert_allclose(old, expected[position][2], rtol=0, atol=1e-5)
            np.testing.assert_allclose(reference, expected[position][3], rtol=0, atol=1e-5)
    assert sorted(holders) == COMPUTED
    if epochs == 1:
        assert all(len(ranks) == 1 for ranks in holders.values())


def first_ratio(rank, config):
    """Largest |log ratio| in the first update over micro-batches that a scoring pass has seen."""
    layout = current_layout()
    policy = tiny_policy()
    stepper = Stepper(policy, single if layout.world_size == 1 else ddp)
    strategy = stepper.strategy
    mine = scored_samples()[layout.dp_rank :: layout.dp_size]
    maker = maker_of(strategy, config=config)
    iteration = maker(lambda: mine, Stopwatch())
    [share, *_] = iteration.sampler.shares(iteration.sampler.plans)
    mini_batch = maker.collator(iteration.experience.__getitems__(share))
    differences = [0.0]
    with strategy.train_mode("policy"):
        for micro_batch in mini_batch.micro_batches:
            out = policy(micro_batch, with_entropy=True)
            differences += (out.logprob - micro_batch.old_logprob).abs().tolist()
    return max(differences)


@pytest.mark.parametrize(
    "config",
    [
        BUDGET,
        BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=1000),
        BatchingConfig(mini_batch_size=12, use_dynamic_bsz=False, micro_batch_size_per_gpu=5),
        BatchingConfig(mini_batch_size=12, max_token_len_per_gpu=40, order="balanced_ends"),
    ],
)
def test_the_first_ratio_is_exactly_1(config):
    """The same plan serves scoring and first update, so not even the rounding differs."""
    assert first_ratio(0, config) == 0


@pytest.mark.ranks
def test_the_first_ratio_is_exactly_1_on_ranks():
    assert run_on_ranks(2, partial(first_ratio, config=BUDGET)) == [0, 0]


def test_only_what_the_loss_needs_is_scored():
    policy = tiny_policy()
    maker = maker_of(single({"policy": policy}), loss=SFT())
    iteration = maker(scored_samples, Stopwatch())
    assert iteration.advantages is None
    row = iteration.experience.rows[0]
    assert (row.advantage, row.old_logprob, row.ref_logprob) == (None, None, None)


def test_time_is_kept_by_phase():
    watch = Stopwatch()
    maker_of(single({"policy": tiny_policy(), "reference": tiny_policy()}), use_kl_loss=True)(scored_samples, watch)
    assert set(watch.seconds) == {"plan", "exchange", "old_logprob", "ref_logprob"}
    with watch.phase("plan"):
        pass
    assert watch.seconds["plan"] > 0


def test_scoring_leaves_no_gradient_and_no_mode_behind():
    policy = tiny_policy().train()
    iteration = maker_of(single({"policy": policy}))(scored_samples, Stopwatch())
    assert policy.training
    assert not iteration.experience.rows[0].old_logprob.requires_grad
    assert all(p.grad is None for p in policy.parameters())


def test_positions_past_the_samples_are_fillers():
    config = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=40, planner="karmarkar_karp", equal_counts=True)
    maker = maker_of(single({"policy": tiny_policy()}), config=config)
    iteration = maker(scored_samples, Stopwatch())
    filler = iteration.experience[12]
    assert filler.sample.is_padding
    assert not filler.sample.loss_mask.any()
    assert len(iteration.experience) == 12
    assert len(iteration.facts) == 12, "fillers are in no metric"


def test_facts_are_lengths_and_rewards():
    samples, facts = gather_facts(scored_samples, single({}).collectives)
    assert len(samples) == len(facts) == 12
    assert [f.reward for f in facts] == REWARDS
    assert facts[3].parts == {"bonus": 3.0}
    assert not facts[0].truncated


@pytest.mark.parametrize("verdict", [None, math.nan, math.inf, -math.inf])
def test_a_sample_that_cannot_be_scored_leaves_the_loss(verdict):
    kept, left = ScoredSample(sample(0), Score(0.0)), ScoredSample(sample(1), Score(verdict))
    samples, facts = gather_facts(lambda: [kept, left], single({}).collectives)
    assert [s.loss_mask.any().item() for s in samples] == [True, False]
    assert [f.meta.loss_tokens for f in facts] == [4, 0]


def collect_or_fail(rank):
    if rank == 1:
        raise TrainingError("the judge is ill")
    return scored_samples()


def gathered(rank):
    try:
        gather_facts(partial(collect_or_fail, rank), ddp({}).collectives)
    except RLModuleError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_a_failure_on_one_rank_ends_all_with_its_reason():
    """Nobody is left waiting in the exchange, and every log says why."""
    assert run_on_ranks(3, gathered) == [
        "data rank 1 could not collect its responses: the judge is ill",
        "the judge is ill",
        "data rank 1 could not collect its responses: the judge is ill",
    ]


def test_no_response_at_all_makes_an_empty_iteration():
    iteration = maker_of(single({"policy": tiny_policy()}))(list, Stopwatch())
    assert len(iteration.sampler) == 0
    assert len(iteration.experience) == 0
