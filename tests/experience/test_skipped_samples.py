"""A sample that cannot change the gradient is not computed: the step is the same, only cheaper."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch

from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import RewardResult, ScoredSample
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.iteration_state import SavedIteration, iteration_state
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.timer import Timer
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.sft import SFT
from rlmodule.training.reduction import reduce_metrics
from strategies.parts.mesh import current_layout
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import SMOOTH, Stepper, ddp, sample, single, tiny_policy

# Groups of three. The second is flat, a sample of the third has no verdict, the fourth's middle sample hits the mean.
REWARDS = [1.0, 0.0, 0.5, 0.3, 0.3, 0.3, None, 1.0, 0.0, 0.0, 0.5, 1.0]
LEFT_OUT = {3, 4, 5, 6, 10, 2}
LENGTHS = ((3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2), (4, 4), (2, 7), (1, 1), (5, 5))
CONFIG = BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=16)


def responses(rewards=REWARDS, rollout_logprob=True):
    out = []
    for i, ((prompt, length), reward) in enumerate(zip(LENGTHS, rewards, strict=True)):
        drawn = sample(i, prompt, length, group=i // 3)
        if rollout_logprob:
            drawn = replace(drawn, rollout_logprob=torch.full((length,), -4.0))
        out.append(ScoredSample(drawn, RewardResult(reward)))
    return out


def maker_of(stepper, algorithm, config=CONFIG, epochs=1, loss=None):
    strategy, objective = stepper.strategy, Objective(loss or PPOClip(), algorithm)
    return ExperienceMaker(
        Scorer(strategy, objective, DynamicCollator(), torch.device("cpu")),
        AdvantageStage(objective, GRPO(), strategy.collectives),
        lambda metas: BalancedSampler(metas, config, strategy.layout, seed=0, iteration=0, epochs=epochs),
    )


def iteration_of(stepper, algorithm, scored, config=CONFIG, epochs=1, loss=None):
    layout = stepper.strategy.layout
    maker = maker_of(stepper, algorithm, config, epochs, loss)
    return maker(lambda: scored[layout.dp_rank :: layout.dp_size], Timer())


def train(rank, skip, rewards=REWARDS, config=CONFIG, mode="token-mean"):
    """(weights, norms, metrics, samples computed here) of one iteration of two steps."""
    layout = current_layout()
    algorithm = AlgorithmConfig(skip_zero_advantage=skip, loss_agg_mode=mode)
    policy = tiny_policy()
    stepper = Stepper(policy, single if layout.world_size == 1 else ddp, algorithm=algorithm, optimizer=SMOOTH)
    iteration = iteration_of(stepper, algorithm, responses(rewards), config, epochs=2)
    collate = DynamicCollator()
    batches = [collate(iteration.experience.__getitems__(share)) for share in iteration.sampler]
    results = [stepper(batch) for batch in batches]
    metrics = [reduce_metrics(r.metrics, layout, stepper.strategy.collectives) for r in results]
    computed = {p for plan in iteration.sampler.plans for p in plan.positions}
    weights = {name: p.detach().numpy().copy() for name, p in policy.named_parameters()}
    return (
        weights,
        [r.grad_norm for r in results],
        [{k: m.result for k, m in step.items()} for step in metrics],
        computed,
    )


def assert_same_step(got, expected):
    for name, value in expected[0].items():
        np.testing.assert_allclose(got[0][name], value, rtol=0, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-9)
    for here, there in zip(got[2], expected[2], strict=True):
        for name in ("actor/loss", "actor/pg_loss"):
            assert here[name] == pytest.approx(there[name], abs=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_the_step_is_the_same_with_and_without(mode):
    skipped, computed = train(0, True, mode=mode), train(0, False, mode=mode)
    assert computed[3] == set(range(12)) - {6}, "without a loss token there is nothing to compute in any case"
    assert skipped[3] == set(range(12)) - LEFT_OUT
    assert_same_step(skipped, computed)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_step_is_the_same_on_ranks(world_size):
    expected = train(0, False)
    for rank in run_on_ranks(world_size, partial(train, skip=True)):
        assert rank[3] == set(range(12)) - LEFT_OUT, "one plan on every rank"
        assert_same_step(rank, expected)


@pytest.mark.parametrize(
    "config",
    [
        BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=40, planner="karmarkar_karp"),
        BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=40, planner="joint_free"),
        BatchingConfig(mini_batch_size=6, use_dynamic_bsz=False, micro_batch_size_per_gpu=2),
        BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=40, planner="karmarkar_karp", equal_counts=True),
    ],
)
def test_every_planner_can_leave_out(config):
    skipped = train(0, True, config=config)
    assert_same_step(skipped, train(0, False, config=config))
    assert skipped[3] == set(range(12)) - (set() if config.equal_counts else LEFT_OUT)


def steps_of(rank, skip, rewards, equal_counts=False):
    """(weights, moments and schedule after each mini-batch, results) of two iterations: ``REWARDS``, then these."""
    layout = current_layout()
    algorithm = AlgorithmConfig(skip_zero_advantage=skip)
    stepper = Stepper(tiny_policy(), single if layout.world_size == 1 else ddp, algorithm=algorithm, optimizer=SMOOTH)
    config = CONFIG
    if equal_counts:
        config = BatchingConfig(
            mini_batch_size=6, max_token_len_per_gpu=40, planner="karmarkar_karp", equal_counts=True
        )
    states, results = [], []
    for drawn in (REWARDS, rewards):
        iteration = iteration_of(stepper, algorithm, responses(drawn), config)
        for share in iteration.sampler:
            results.append(stepper(DynamicCollator()(iteration.experience.__getitems__(share))))
            moments = [s["exp_avg"].sum().item() for s in stepper.optimizer.state.values()]
            weights = [p.sum().item() for p in stepper.policy.parameters()]
            states.append((weights, moments, stepper.schedule.last_epoch))
    return states, [(r.stepped, r.zero_gradient, r.empty) for r in results]


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mini_batch_without_a_gradient_is_no_optimizer_step(world_size, skip, equal_counts):
    """Issue 10, point 7: weights, moments and schedule stay; moments alone would move the weights."""
    work = partial(steps_of, skip=skip, rewards=[0.5] * 12, equal_counts=equal_counts)
    for states, results in [work(0)] if world_size == 1 else run_on_ranks(world_size, work):
        assert results == [(True, False, False)] * 2 + [(False, True, False)] * 2
        assert states[1] == states[2] == states[3]


def test_one_group_with_a_gradient_makes_a_step_of_its_mini_batch_alone():
    states, results = steps_of(0, True, [0.5] * 11 + [0.0])
    taken = [stepped for stepped, _, _ in results[2:]]
    assert any(taken)
    assert [zero for _, zero, _ in results[2:]] == [not stepped for stepped in taken]
    assert states[3] != states[1]


def test_what_has_a_gradient_outlives_a_restart():
    """An iteration that a checkpoint interrupts plans the same steps afterwards."""
    algorithm = AlgorithmConfig(skip_zero_advantage=False)
    stepper, ordered = Stepper(tiny_policy(), algorithm=algorithm), replace(CONFIG, shuffle=False)
    maker = maker_of(stepper, algorithm, ordered)
    before = maker(lambda: responses([0.5] * 11 + [0.0]), Timer())
    shared, mine = iteration_state(before)
    after = maker.resumed(SavedIteration.from_state(shared, [mine]))
    for iteration in (before, after):
        assert [share.has_gradient for share in iteration.sampler.remaining()] == [False, True]


def test_metrics_per_token_are_means_over_trained_tokens():
    """pg_loss is the share of all tokens; entropy that of the samples that were computed."""
    algorithm = AlgorithmConfig(skip_zero_advantage=True)
    stepper = Stepper(tiny_policy(), algorithm=algorithm)
    iteration = iteration_of(stepper, algorithm, responses())
    [share, _] = iteration.sampler
    batch = DynamicCollator()(iteration.experience.__getitems__(share))
    result = stepper(batch)
    trained = sum(len(m.labels) for m in batch.micro_batches)
    assert trained < batch.totals.tokens
    assert result.metrics["actor/entropy"].weight == trained
    assert share.metrics["balance/skipped_samples"] == 6 - sum(map(len, share.micro_batches))


def test_what_is_left_out_gets_no_old_log_probabilities():
    algorithm = AlgorithmConfig()
    iteration = iteration_of(Stepper(tiny_policy()), algorithm, responses())
    assert set(iteration.experience.rows) == set(range(12)) - LEFT_OUT
    assert all(row.old_logprob is not None for row in iteration.experience.rows.values())
    assert [f.reward for f in iteration.sample_info] == REWARDS, "everybody still knows of them"


@dataclass(frozen=True)
class Unpromised(PPOClip):
    """A loss that promises nothing."""

    zero_at_zero_advantage: ClassVar[bool] = False


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        (PPOClip(), {"skip_zero_advantage": False}),
        (PPOClip(), {"entropy_coeff": 0.1}),
        (PPOClip(), {"use_kl_loss": True}),
        (SFT(), {}),
        (Unpromised(), {}),
    ],
)
def test_samples_stay_where_their_gradient_may_not_be_0(loss, config):
    assert Objective(PPOClip(), AlgorithmConfig()).ignores_zero_advantage
    assert not Objective(loss, AlgorithmConfig(**config)).ignores_zero_advantage


# ---- the sampler's own log-probabilities


def test_the_samplers_log_probabilities_are_taken_as_they_are():
    algorithm = AlgorithmConfig(old_logprob="rollout")
    iteration = iteration_of(Stepper(tiny_policy()), algorithm, responses())
    for row in iteration.experience.rows.values():
        assert torch.equal(row.old_logprob, row.sample.rollout_logprob)


def half_of_them(rank):
    stepper = Stepper(tiny_policy(), ddp)
    scored = [
        s if i % 2 == 0 else ScoredSample(replace(s.sample, rollout_logprob=None), s.score)
        for i, s in enumerate(responses())
    ]
    try:
        iteration_of(stepper, AlgorithmConfig(old_logprob="rollout"), scored)
    except TrainingError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_a_response_without_them_ends_every_rank():
    first, second = run_on_ranks(2, half_of_them)
    assert "sample 1 comes without the log-probabilities it was drawn with" in second
    assert "rank 1 could not collect" in first
