"""Responses become rows ready to train on: facts known to all, samples where they train, the first ratio exactly 1.

Where responses come from is in ``rollout/`` and ``data/``; what is done with the rows in ``test_update.py``.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.errors import RLModuleError, TrainingError
from rlmodule.core.types import RewardResult, ScoredSample
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.gathering import gather_sample_info
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.timer import Timer
from rlmodule.losses.gspo import GSPO
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.sft import SFT
from rlmodule.training.reduction import reduce_metrics
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import SMOOTH, Stepper, sample, single, tiny_policy, wrap_here

CPU = torch.device("cpu")
BUDGET = BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=16)
# Groups of three; the fifth sample cannot be scored, the third group is flat.
REWARDS = [1.0, 0.0, 0.0, 0.5, None, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.25]
HELD = [i for i, reward in enumerate(REWARDS) if reward is not None]  # the others carry no loss: nobody computes them


def scored_samples():
    lengths = [(3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2), (4, 4), (2, 7), (1, 1), (5, 5)]
    return [
        ScoredSample(sample(i, prompt, response, group=i // 3), RewardResult(REWARDS[i], {"bonus": float(i)}))
        for i, (prompt, response) in enumerate(lengths)
    ]


def maker_of(strategy, *, loss=None, config=BUDGET, epochs=1, **algorithm):
    objective = Objective(loss or PPOClip(), AlgorithmConfig(**algorithm))
    return ExperienceMaker(
        Scorer(strategy, objective, DynamicCollator(), CPU),
        AdvantageStage(objective, GRPO(), strategy.collectives),
        lambda metas: BalancedSampler(metas, config, strategy.layout, seed=0, iteration=0, epochs=epochs),
    )


def my_samples(layout, samples):
    """Drawn on all ranks in turn."""
    return samples[layout.dp_rank :: layout.dp_size]


def make(rank, *, epochs=1):
    """What one rank holds of an iteration, scored by policy and reference."""
    strategy = wrap_here({"policy": tiny_policy(), "reference": tiny_policy(seed=1).requires_grad_(False)})
    layout = strategy.layout
    mine = my_samples(layout, scored_samples())
    iteration = maker_of(strategy, epochs=epochs, use_kl_loss=True)(lambda: mine, Timer())
    rows = {
        position: (
            row.sample.sample_id,
            float(row.advantage[0]),
            row.old_logprob.numpy().copy(),
            row.ref_logprob.numpy().copy(),
        )
        for position, row in iteration.experience.rows.items()
    }
    trained_models = {
        p for plan in iteration.sampler.plans for step in plan.micro_batches[layout.dp_rank] for p in step
    }
    assert set(rows) == trained_models, "a rank holds what it trains on, and nothing else"
    return rows, [f.meta for f in iteration.sample_info], iteration.advantages.tolist()


SCORED = [i for i, reward in enumerate(REWARDS) if reward is not None]


def test_one_rank_holds_every_sample_with_its_scores():
    rows, metas, advantages = make(0)
    assert sorted(rows) == SCORED, "what has no loss token is computed nowhere"
    assert [meta.sample_id for meta in metas] == list(range(12))
    for position, (sample_id, advantage, old, reference) in rows.items():
        assert sample_id == position
        assert advantage == pytest.approx(advantages[position], rel=1e-6)
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
    expected, metas, advantages = make(0)
    holders = {}
    for rank, (rows, known, computed) in enumerate(run_on_ranks(world_size, partial(make, epochs=epochs))):
        assert known == metas
        assert computed == advantages
        for position, (sample_id, advantage, old, reference) in rows.items():
            holders.setdefault(position, set()).add(rank)
            assert sample_id == expected[position][0]
            assert advantage == expected[position][1]
            np.testing.assert_allclose(old, expected[position][2], rtol=0, atol=1e-5)
            np.testing.assert_allclose(reference, expected[position][3], rtol=0, atol=1e-5)
    assert sorted(holders) == SCORED
    if epochs == 1:
        assert all(len(ranks) == 1 for ranks in holders.values())


class Drift:
    """An objective that notes how far each token's log-probability has moved since it was scored."""

    needs_entropy = True

    def __init__(self, batch, whole_sequences):
        self.batch, self.whole_sequences, self.moved = batch, whole_sequences, []

    def __call__(self, logprob, entropy, part):
        self.moved += (logprob - self.batch.old_logprob[part]).abs().tolist()
        return logprob.sum()


def first_drift(rank, config, family="qwen3", whole_sequences=False):
    """Largest |log ratio| in the forward pass of the first update."""
    policy = tiny_policy(family)
    strategy = wrap_here({"policy": policy})
    maker = maker_of(strategy, config=config, skip_zero_advantage=False, old_logprob="recompute")
    iteration = maker(lambda: my_samples(strategy.layout, scored_samples()), Timer())
    share = iteration.sampler.shares(iteration.sampler.plans)[0]
    moved = [0.0]
    with strategy.train_mode("policy"):
        for micro_batch in maker.scorer.collator(iteration.experience.__getitems__(share)).micro_batches:
            drift = Drift(micro_batch, whole_sequences)
            strategy.wrapped("policy")(micro_batch, objective=drift).backward()
            assert len(drift.moved) == len(micro_batch.labels)
            moved += drift.moved
    return max(moved)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(
    "config",
    [
        BUDGET,
        BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=1000),
        BatchingConfig(mini_batch_size=12, use_dynamic_bsz=False, micro_batch_size_per_gpu=5),
        BatchingConfig(mini_batch_size=12, max_token_len_per_gpu=40, order="balanced_ends"),
    ],
    ids=["budget 16", "budget 1000", "five by five", "balanced ends"],
)
def test_the_first_ratio_is_exactly_1(config, family):
    """The same plan serves scoring and first update, so not even the rounding differs."""
    assert first_drift(0, config, family) == 0


def test_the_first_ratio_is_exactly_1_for_losses_over_whole_sequences():
    assert first_drift(0, BUDGET, whole_sequences=True) == 0


@pytest.mark.ranks
def test_the_first_ratio_is_exactly_1_on_ranks():
    assert run_on_ranks(2, partial(first_drift, config=BUDGET)) == [0, 0]


def trained(rank, config=BUDGET, loss=None, **algorithm):
    """Weights after one iteration of two mini-batches, with what each step logged, and how many samples were computed."""
    algorithm = AlgorithmConfig(log_entropy=False, **algorithm)
    stepper = Stepper(tiny_policy(), wrap_here, algorithm=algorithm, optimizer=SMOOTH, loss=loss)
    strategy = stepper.strategy
    maker = maker_of(strategy, loss=loss, config=config, **vars(algorithm))
    iteration = maker(lambda: my_samples(strategy.layout, scored_samples()), Timer())
    steps = []
    for share in iteration.sampler.shares(iteration.sampler.plans):
        result = stepper(maker.scorer.collator(iteration.experience.__getitems__(share)))
        merged = reduce_metrics(result.metrics, strategy.layout, strategy.collectives)
        steps.append((merged["actor/pg_loss"].result, result.grad_norm))
    weights = {name: p.detach().numpy().copy() for name, p in stepper.policy.named_parameters()}
    return steps, weights, len(iteration.experience.rows)


def assert_same_steps(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-7)
    for name, value in expected[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.ranks
def test_leaving_out_what_has_no_gradient_changes_nothing():
    """The flat group is not computed; loss, gradient norm and weights stay, on one rank and on two."""
    expected = trained(0, skip_zero_advantage=False)
    got = trained(0)
    assert (expected[2], got[2]) == (11, 8)
    assert_same_steps(got, expected)
    for rank in run_on_ranks(2, trained):
        assert_same_steps(rank, expected)


@pytest.mark.parametrize("extra", [{"entropy_coeff": 0.1}, {"use_kl_loss": True}])
def test_nothing_is_left_out_that_another_term_trains_on(extra):
    models = {"policy": tiny_policy(), "reference": tiny_policy(seed=1).requires_grad_(False)}
    iteration = maker_of(single(models), **extra)(scored_samples, Timer())
    assert sorted(iteration.experience.rows) == SCORED


def with_sampler_logprobs(samples):
    return [
        replace(s, sample=replace(s.sample, rollout_logprob=torch.full((len(s.sample.response_ids),), -float(i + 1))))
        for i, s in enumerate(samples)
    ]


def test_the_sampler_s_own_log_probabilities_may_be_the_old_ones():
    timer = Timer()
    maker = maker_of(single({"policy": tiny_policy()}), old_logprob="rollout")
    iteration = maker(lambda: with_sampler_logprobs(scored_samples()), timer)
    for position, item in iteration.experience.rows.items():
        assert item.old_logprob.tolist() == [-(position + 1)] * len(item.sample.response_ids)


def collect_without(rank):
    """Rank 1 has samples of which the sampler said nothing."""
    strategy = wrap_here({"policy": tiny_policy()})
    mine = my_samples(strategy.layout, scored_samples())
    mine = mine if rank == 1 else with_sampler_logprobs(mine)
    try:
        maker_of(strategy, old_logprob="rollout")(lambda: mine, Timer())
    except RLModuleError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_sampler_log_probabilities_that_are_missing_end_all_ranks_with_the_reason():
    for text in run_on_ranks(2, collect_without):
        assert "without the log-probabilities it was drawn with" in text
        assert "algorithm.old_logprob=recompute" in text


WHOLE = BatchingConfig(mini_batch_size=12, max_token_len_per_gpu=16)


@pytest.mark.parametrize("loss", [PPOClip(), GSPO()], ids=["ppo_clip", "gspo"])
def test_an_iteration_of_one_step_needs_no_pass_for_old_log_probabilities(loss):
    """The update gives them itself: losses, norms and weights are those of a run with the pass, to the bit."""
    got, expected = (trained(0, config=WHOLE, loss=loss, old_logprob=old) for old in ("auto", "recompute"))
    assert got[0] == expected[0] and got[2] == expected[2]
    assert all(np.array_equal(got[1][name], value) for name, value in expected[1].items())
    phases = []
    for config, extra in ((WHOLE, {}), (BUDGET, {}), (WHOLE, {"use_kl_in_reward": True})):
        timer = Timer()
        models = {"policy": tiny_policy(), "reference": tiny_policy(seed=1).requires_grad_(False)}
        maker_of(single(models), loss=loss, config=config, **extra)(scored_samples, timer)
        phases.append("old_logprob" in timer.seconds)
    assert phases == [False, True, True], "several steps, and a KL in the reward, read them before"


def test_only_what_the_loss_needs_is_scored():
    policy = tiny_policy()
    maker = maker_of(single({"policy": policy}), loss=SFT())
    iteration = maker(scored_samples, Timer())
    assert iteration.advantages is None
    row = iteration.experience.rows[0]
    assert (row.advantage, row.old_logprob, row.ref_logprob) == (None, None, None)


def test_time_is_kept_by_phase():
    timer = Timer()
    maker_of(single({"policy": tiny_policy(), "reference": tiny_policy()}), use_kl_loss=True)(scored_samples, timer)
    assert set(timer.seconds) == {"plan", "exchange", "old_logprob", "ref_logprob"}
    with timer.phase("plan"):
        pass
    assert timer.seconds["plan"] > 0


def test_scoring_leaves_no_gradient_and_no_mode_behind():
    policy = tiny_policy().train()
    iteration = maker_of(single({"policy": policy}))(scored_samples, Timer())
    assert policy.training
    assert not iteration.experience.rows[0].old_logprob.requires_grad
    assert all(p.grad is None for p in policy.parameters())


def test_positions_past_the_samples_are_fillers():
    config = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=40, planner="karmarkar_karp", equal_counts=True)
    maker = maker_of(single({"policy": tiny_policy()}), config=config)
    iteration = maker(scored_samples, Timer())
    filler = iteration.experience[12]
    assert filler.sample.is_padding
    assert not filler.sample.loss_mask.any()
    assert len(iteration.experience) == 12
    assert len(iteration.sample_info) == 12, "fillers are in no metric"


def test_facts_are_lengths_and_rewards():
    samples, sample_info = gather_sample_info(scored_samples, single({}).collectives)
    assert len(samples) == len(sample_info) == 12
    assert [f.reward for f in sample_info] == REWARDS
    assert sample_info[3].parts == {"bonus": 3.0}
    assert not sample_info[0].truncated


@pytest.mark.parametrize("verdict", [None, math.nan, math.inf, -math.inf])
def test_a_sample_that_cannot_be_scored_leaves_the_loss(verdict):
    kept, left = ScoredSample(sample(0), RewardResult(0.0)), ScoredSample(sample(1), RewardResult(verdict))
    samples, sample_info = gather_sample_info(lambda: [kept, left], single({}).collectives)
    assert [s.loss_mask.any().item() for s in samples] == [True, False]
    assert [f.meta.loss_tokens for f in sample_info] == [4, 0]


def collect_or_fail(rank):
    if rank == 1:
        raise TrainingError("the judge is ill")
    return scored_samples()


def all_gather_dict(rank):
    try:
        gather_sample_info(partial(collect_or_fail, rank), wrap_here({}).collectives)
    except RLModuleError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_a_failure_on_one_rank_ends_all_with_its_reason():
    """Nobody is left waiting in the exchange, and every log says why."""
    assert run_on_ranks(3, all_gather_dict) == [
        "rank 1 could not collect its responses: the judge is ill",
        "the judge is ill",
        "rank 1 could not collect its responses: the judge is ill",
    ]


def test_no_response_at_all_makes_an_empty_iteration():
    iteration = maker_of(single({"policy": tiny_policy()}))(list, Timer())
    assert len(iteration.sampler) == 0
    assert len(iteration.experience) == 0
