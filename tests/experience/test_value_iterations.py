"""From responses to what a value function learns: values, charges and ends of every token, on one rank or several.

Expected numbers are made sample by sample in plain Python. Whole runs under every strategy are in
``strategies/test_critic.py``.
"""

from dataclasses import replace
from functools import partial
from statistics import mean, stdev

import numpy as np
import pytest
import torch

from rlmodule.advantages.gae import GAE
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.algorithm.rollout_rejection import RolloutRejection
from rlmodule.algorithm.shaping import KLController, KLInReward
from rlmodule.batching.collate import DynamicCollator, pack_rows
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.types import RewardResult, ScoredSample, StepTotals, TrainingSample
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.timer import Timer
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.description import ModelConfig
from rlmodule.models.value import PolicyValueModel, build_value_model
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import architecture, sample, tiny_policy, wrap_here

TOTALS = StepTotals(tokens=1000, sequences=8)
BUDGET = BatchingConfig(mini_batch_size=4, max_token_len_per_gpu=18)
GAMMA, LAM = 0.9, 0.8
HOLES = {1: [True, False, True, True, False, True], 4: [False, True, True, False]}  # tools and observations
LENGTHS = [(3, 4), (2, 6), (4, 2), (1, 5), (3, 4), (5, 1)]
REWARDS = [1.0, 0.0, None, 0.5, -1.0, 0.25]
CUT_AT_THE_LIMIT = (0, 1)
PRICE = 0.1


def scored_samples():
    made = []
    for i, (prompt, response) in enumerate(LENGTHS):
        item = sample(i, prompt, response, loss_mask=HOLES.get(i), group=i)
        item = replace(item, finish_reason="length" if i in CUT_AT_THE_LIMIT else "stop")
        made.append(ScoredSample(item, RewardResult(REWARDS[i])))
    return made


def value_model():
    model = build_value_model(ModelConfig(architecture=architecture()), seed=3)
    torch.nn.init.normal_(model.lm.score.weight, generator=torch.Generator().manual_seed(5))
    return model


def shared_model():
    model = PolicyValueModel(tiny_policy())
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(5))
    return model


def models(kind):
    own = {"policy": tiny_policy(), "critic": value_model()} if kind == "critic" else {"policy": shared_model()}
    return own | {"reference": tiny_policy(seed=1).requires_grad_(False)}


def make(rank, kind="critic", *, bootstrap=False, kl=False, epochs=1, sizes=None):
    """(position -> what its row holds, metrics) on one rank."""
    strategy = wrap_here(models(kind))
    layout = strategy.layout
    algorithm = AlgorithmConfig(use_kl_in_reward=kl, kl_in_reward=KLInReward(coef=PRICE))
    objective, advantage = Objective(PPOClip(), algorithm), GAE(gamma=GAMMA, lam=LAM, bootstrap_truncated=bootstrap)
    controller = KLController(algorithm.kl_in_reward) if kl else None
    maker = ExperienceMaker(
        Scorer(strategy, objective, DynamicCollator(), torch.device("cpu"), value_model=kind),
        AdvantageStage(objective, advantage, strategy.collectives, controller),
        lambda metas: BalancedSampler(
            metas, BUDGET, layout, seed=0, iteration=0, epochs=epochs, trained_models=sizes or {"policy": 4, kind: 4}
        ),
    )
    iteration = maker(lambda: scored_samples()[layout.dp_rank :: layout.dp_size], Timer())
    rows = {
        p: {name: getattr(row, name).numpy().copy() for name in ("advantage", "returns", "old_value")}
        for p, row in iteration.experience.rows.items()
    }
    return rows, dict(iteration.metrics)


def said_of(item, kind):
    """[n] values of a sample's loss tokens, alone in a row, and the value after its last token."""
    model = models(kind)[kind]
    value, after = (
        model(pack_rows([TrainingSample(x)], TOTALS)).value.tolist() for x in (item, item.extended_by_one())
    )
    return value, after[0]


def kl_of(item):
    of = models("critic")
    policy, reference = (
        of[name](pack_rows([TrainingSample(item)], TOTALS)).logprob for name in ("policy", "reference")
    )
    return (policy - reference).tolist()


def by_hand(kind, *, bootstrap=False, kl=False):
    """position -> (values, advantages before whitening) of its loss tokens, one delta at a time from the end."""
    told = {}
    for i, scored in enumerate(scored_samples()):
        if REWARDS[i] is None:
            continue
        value, after = said_of(scored.sample, kind)
        earned = [-PRICE * d for d in kl_of(scored.sample)] if kl else [0.0] * len(value)
        earned[-1] += REWARDS[i]
        expected = after if bootstrap and i in CUT_AT_THE_LIMIT else 0.0
        advantage, later = [], 0.0
        for t in reversed(range(len(value))):
            later = earned[t] + GAMMA * expected - value[t] + GAMMA * LAM * later
            expected = value[t]
            advantage.insert(0, later)
        told[i] = value, advantage
    return told


@pytest.mark.parametrize("kind", ["critic", "policy"])
@pytest.mark.parametrize(("bootstrap", "kl"), [(False, False), (True, False), (False, True)])
def test_rows_hold_what_plain_python_makes_of_them(kind, bootstrap, kl):
    """Masked tokens are skipped and carried across, the unscored sample is nowhere, whitening is over all tokens."""
    rows, metrics = make(0, kind, bootstrap=bootstrap, kl=kl)
    told = by_hand(kind, bootstrap=bootstrap, kl=kl)
    assert sorted(rows) == sorted(told)
    everything = [a for _, advantage in told.values() for a in advantage]
    for i, (value, advantage) in told.items():
        mask = scored_samples()[i].sample.loss_mask.numpy()
        white = [(a - mean(everything)) / stdev(everything) for a in advantage]
        returns = [v + a for v, a in zip(value, advantage, strict=True)]
        for name, expected in (("old_value", value), ("advantage", white), ("returns", returns)):
            assert rows[i][name][mask] == pytest.approx(expected, rel=1e-4, abs=1e-5), name
            assert not rows[i][name][~mask].any()
    values = [v for value, _ in told.values() for v in value]
    assert metrics["critic/values/mean"] == pytest.approx(mean(values), rel=1e-5)
    spread = [a for _, advantage in told.values() for a in advantage]
    returns = [v + a for value, advantage in told.values() for v, a in zip(value, advantage, strict=True)]
    assert metrics["critic/explained_variance"] == pytest.approx(1 - stdev(spread) ** 2 / stdev(returns) ** 2, rel=1e-4)


@pytest.mark.parametrize("kind", ["critic", "policy"])
def test_a_value_function_takes_its_step_where_every_advantage_is_zero(kind):
    """Values of 0 and rewards of 1: whitened advantages are 0, and the value function has everything to learn."""
    of = models(kind)
    torch.nn.init.zeros_(of["critic"].lm.score.weight if kind == "critic" else of["policy"].value_head.weight)
    strategy = wrap_here(of)
    rejection = RolloutRejection(token_estimator="k3", token_upper=1e6)  # which counts anew what is left: all
    objective = Objective(PPOClip(), AlgorithmConfig(rollout_rejection=rejection))
    maker = ExperienceMaker(
        Scorer(strategy, objective, DynamicCollator(), torch.device("cpu"), value_model=kind),
        AdvantageStage(objective, GAE(lam=1.0), strategy.collectives),
        lambda metas: BalancedSampler(metas, BUDGET, strategy.layout, seed=0, iteration=0),
    )
    drawn = [
        replace(one.sample, rollout_logprob=torch.full(one.sample.loss_mask.shape, -4.0)) for one in scored_samples()
    ]
    iteration = maker(lambda: [ScoredSample(item, RewardResult(1.0)) for item in drawn], Timer())
    rows = iteration.experience.rows.values()
    assert not any(row.advantage.any() for row in rows)
    assert all(row.returns[row.sample.loss_mask].allclose(torch.ones(1)) for row in rows)
    assert [plan.has_gradient for plan in iteration.sampler.plans] == [True, True]


def test_the_value_after_the_end_is_read_at_the_last_token():
    """What comes next is nobody's choice yet, so it cannot matter which token stands there."""
    item = scored_samples()[0].sample
    model = value_model()
    ids = torch.cat([torch.tensor(item.prompt.ids), item.response_ids])
    model.lm.set_attn_implementation("eager")
    hidden = model.lm.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, -1]
    assert said_of(item, "critic")[1] == pytest.approx(model.lm.score(hidden[None]).item(), rel=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "config", [{}, {"bootstrap": True, "kl": True}, {"epochs": 2, "sizes": {"policy": 4, "critic": 3}}]
)
def test_ranks_make_the_numbers_of_one_process(world_size, config):
    expected, expected_metrics = make(0, **config)
    held = set()
    for rows, metrics in run_on_ranks(world_size, partial(make, **config)):
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
        held |= rows.keys()
        for position, row in rows.items():
            for name, value in row.items():
                np.testing.assert_allclose(value, expected[position][name], rtol=1e-4, atol=1e-5)
    assert held == expected.keys()
