"""Groups left out, rewards shaped, KL charged, sampler mismatch corrected: in a whole iteration, on one rank and on two."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlmodule.advantages.reinforce_pp import ReinforcePP
from rlmodule.advantages.remax import ReMax
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.algorithm.rollout_correction import RolloutCorrection, correction_weights
from rlmodule.algorithm.shaping import FilterGroups, KLController, KLInReward, OverlongBuffer
from rlmodule.batching.collate import DynamicCollator
from rlmodule.core.episodes import Completion
from rlmodule.core.errors import TrainingError
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, RewardResult, ScoredSample
from rlmodule.data.chat import ChatFormat
from rlmodule.data.stream import PromptStream
from rlmodule.datamodule import RLDataModule
from rlmodule.environments.parts.single_turn import SingleTurnEpisode
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.episodes import EpisodeRunner
from rlmodule.experience.gathering import gather_sample_info
from rlmodule.experience.iteration_metrics import scored_advantages
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.sources import RolloutSource, RowSampler
from rlmodule.experience.timer import Timer
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.reinforce import Reinforce
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.ops.kl import kl_per_token
from tests.experience.shaped import CENTRED, ROUNDS, drawn, iteration_of
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import sample, single, tiny_policy


def iterate(rank, **config):
    """(ids and advantages of the iteration, rows of this rank by sample id, metrics)."""
    _, iteration = iteration_of(rank, **config)
    told = dict(zip((f.meta.sample_id for f in iteration.sample_info), iteration.advantages.tolist(), strict=True))
    rows = {row.sample.sample_id: row for row in iteration.experience.rows.values()}
    return told, rows, dict(iteration.metrics)


def numbers_of(rank, **config):
    """The same without tensors, to compare ranks."""
    told, rows, metrics = iterate(rank, **config)
    parts = {
        i: [None if x is None else x.tolist() for x in (row.advantage, row.rollout_weight)] for i, row in rows.items()
    }
    return told, parts, metrics


FILTER = FilterGroups(enable=True)


def test_flat_groups_are_replaced_by_later_ones():
    told, rows, metrics = iterate(0, rounds=ROUNDS, filter_groups=FILTER)
    assert sorted(told) == [2, 3, 8, 9, 10, 11], "groups 1, 4 and 5; two rounds were enough"
    assert sorted(rows) == [2, 3, 8, 9, 10, 11]
    assert [told[i] for i in (2, 3)] == [0.5, -0.5]
    assert metrics["filter_groups/gen_batches"] == 2
    assert metrics["filter_groups/kept"] == 0.5
    assert metrics["filter_groups/reward_mean"] == pytest.approx((3 + 0.5 + 1 + 0.25) / 11)


def test_too_many_good_groups_are_cut_in_the_order_of_the_prompts():
    told, _, metrics = iterate(0, rounds=(ROUNDS[0], ROUNDS[2]), filter_groups=FILTER)
    assert sorted(told) == [2, 3, 12, 13, 14, 15], "group 1, then 6 and 7; 8 is one too many"
    assert metrics["filter_groups/kept"] == 0.5


def test_when_the_rounds_are_used_up_it_trains_on_what_there_is():
    told, _, metrics = iterate(0, rounds=ROUNDS, filter_groups=FilterGroups(enable=True, max_num_gen_batches=1))
    assert sorted(told) == [2, 3]
    assert metrics["filter_groups/gen_batches"] == 1


def test_when_no_group_tells_anything_the_last_round_is_kept():
    flat = ({0: (1.0, 1.0), 1: (0.0, 0.0)}, {2: (1.0, 1.0), 3: (0.5, 0.5)})
    told, rows, _ = iterate(0, rounds=flat, filter_groups=FilterGroups(enable=True, max_num_gen_batches=2))
    assert sorted(told) == [4, 5, 6, 7]
    assert rows == {}, "nothing of it can change the policy"


def test_long_answers_are_charged_in_the_advantage_only():
    """Group 1 has answers of 4 and 5 tokens: charges 1/2 and 1 of a buffer of 2 below 5."""
    buffer = OverlongBuffer(enable=True, length=2, max_length=5)
    told, _, metrics = iterate(0, overlong_buffer=buffer)
    assert [told[2], told[3]] == pytest.approx([0.25 + 0.5, -0.75])
    assert metrics["reward/overlong_penalty"] > 0


def test_what_an_environment_showed_is_not_charged():
    """OpenRLHF/OpenRLHF#1243: of 4 tokens drawn, 3 shown and 5 drawn 9 count, in answers that are masked too."""
    shown = torch.tensor([True] * 4 + [False] * 3 + [True] * 5)
    found = [
        ScoredSample(replace(sample(i, 3, 12), loss_mask=shown, finish_reason=reason), RewardResult(1.0))
        for i, reason in enumerate(("stop", "length"))
    ]
    collectives = single({"policy": tiny_policy()}).collectives
    _, info = gather_sample_info(lambda: found, collectives, mask_truncated=True)
    assert info.metas.loss_tokens.tolist() == [9, 0]
    buffer = OverlongBuffer(enable=True, length=4, max_length=12)
    stage = AdvantageStage(Objective(PPOClip(), AlgorithmConfig(overlong_buffer=buffer)), CENTRED, collectives)
    assert stage._shaped_rewards(info, {}).tolist() == [0.75, 0.75]


def test_truncated_answers_count_in_the_group_but_not_in_the_loss():
    """Sample 2, the good answer of group 1, was cut at the limit."""
    told, rows, _ = iterate(0, mask_truncated=True)
    assert [told[2], told[3]] == [0.5, -0.5]
    assert 2 not in rows
    assert bool(rows[3].sample.loss_mask.all())


def test_remax_takes_off_the_greedy_reward():
    told, _, _ = iterate(0, advantage=ReMax(), baseline=0.25)
    assert [told[i] for i in range(6)] == [0.75, 0.75, 0.75, -0.25, -0.25, -0.25]


def test_token_advantages_reach_their_tokens():
    """Returns 0.5^k * reward, k tokens from the end, whitened over all tokens."""
    _, rows, _ = iterate(0, advantage=ReinforcePP(gamma=0.5), skip_zero_advantage=False)
    rewards = {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0, 4: 0.0, 5: 0.0}
    returns = {
        i: [0.5 ** (len(row.sample.response_ids) - 1 - t) * rewards[i] for t in range(len(row.sample.response_ids))]
        for i, row in rows.items()
    }
    everything = torch.tensor([v for i in sorted(returns) for v in returns[i]], dtype=torch.float64)
    for i, row in rows.items():
        expected = (torch.tensor(returns[i], dtype=torch.float64) - everything.mean()) / everything.std()
        torch.testing.assert_close(row.advantage.double(), expected, rtol=1e-5, atol=1e-6)


def test_kl_is_charged_at_the_price_of_the_controller():
    controller = KLController(KLInReward(coef=0.1, controller="adaptive", target=1e-3, horizon=6.0))
    told, rows, metrics = iterate(
        0, controller=controller, use_kl_in_reward=True, kl_in_reward=controller.config, advantage=CENTRED
    )
    assert sorted(rows) == list(range(6)), "every sample must be scored first"
    kl = [float(kl_per_token(rows[i].old_logprob.double(), rows[i].ref_logprob.double(), "k1").sum()) for i in range(6)]
    assert metrics["reward/kl"] == pytest.approx(sum(kl) / 6)
    assert metrics["reward/kl_coef"] == 0.1
    shaped = [1 - 0.1 * kl[2], 0 - 0.1 * kl[3]]
    assert [told[2], told[3]] == pytest.approx([(shaped[0] - shaped[1]) / 2, (shaped[1] - shaped[0]) / 2])
    error = min(max(metrics["reward/kl"] / 1e-3 - 1, -0.2), 0.2)
    assert controller.coef == pytest.approx(0.1 * (1 + error))


def test_answers_without_loss_tokens_have_no_say_in_the_kl_nor_in_its_price():
    """Samples 2 and 5 were cut and are masked: nobody knows their KL, which is not 0."""
    controller = KLController(KLInReward(coef=0.1, controller="adaptive", target=1e-3, horizon=8.0))
    _, rows, metrics = iterate(
        0, controller=controller, use_kl_in_reward=True, kl_in_reward=controller.config, mask_truncated=True
    )
    assert sorted(rows) == [0, 1, 3, 4]
    kl = [float((row.old_logprob - row.ref_logprob).double().sum()) for row in rows.values()]
    assert metrics["reward/kl"] == pytest.approx(sum(kl) / 4)
    error = min(max(metrics["reward/kl"] / 1e-3 - 1, -0.2), 0.2)
    assert controller.coef == pytest.approx(0.1 * (1 + error * 4 / 8))


@pytest.mark.parametrize(("advantage", "count"), [(ReinforcePP(), 4), (CENTRED, 6)])
def test_answers_without_an_advantage_are_not_logged_as_zeros(advantage, count):
    """One advantage per token is none where there are no tokens; that of a group is there all the same."""
    _, iteration = iteration_of(0, advantage=advantage, mask_truncated=True)
    logged = scored_advantages(iteration)
    assert len(logged) == count
    assert not np.isnan(logged).any()


def test_the_mismatch_with_the_sampler_becomes_a_weight():
    config = RolloutCorrection(mode="truncate", upper=1.5)
    _, rows, metrics = iterate(0, rollout_correction=config, loss=Reinforce())
    for row in rows.values():
        expected = correction_weights(row.old_logprob, row.sample.rollout_logprob, config).float()
        assert torch.equal(row.rollout_weight, expected)
    assert 0 < metrics["rollout_corr/clip_frac"] < 1
    assert 0 < metrics["rollout_corr/ess"] < 1
    observed = iterate(0, rollout_correction=RolloutCorrection(mode="observe"))
    assert all(row.rollout_weight is None for row in observed[1].values())
    assert observed[2]["rollout_corr/kl"] == metrics["rollout_corr/kl"]


def test_a_response_without_the_samplers_view_is_refused():
    def blind(rank):
        bare = [replace(s, sample=replace(s.sample, rollout_logprob=None)) for s in drawn(0, (1.0, 0.0))]
        strategy = single({"policy": tiny_policy()})
        objective = Objective(PPOClip(), AlgorithmConfig(rollout_correction=RolloutCorrection(mode="mask")))
        scorer = Scorer(strategy, objective, DynamicCollator(), torch.device("cpu"))
        maker = ExperienceMaker(scorer, AdvantageStage(objective, CENTRED, strategy.collectives), lambda metas: None)
        maker(lambda: bare, Timer())

    with pytest.raises(TrainingError, match=r"sample 0 comes without .* Use algorithm\.rollout_correction\.mode=none"):
        blind(0)


SETTINGS = {
    "dapo": {
        "rounds": ROUNDS,
        "filter_groups": FILTER,
        "overlong_buffer": OverlongBuffer(enable=True, length=2, max_length=6),
        "mask_truncated": True,
    },
    "token advantages": {"advantage": ReinforcePP(gamma=0.9)},
    "kl in the reward": {"use_kl_in_reward": True, "controller": KLController(KLInReward(coef=0.1))},
    "correction": {"rollout_correction": RolloutCorrection(mode="mask", level="geometric", upper=3.0, lower=0.3)},
}


def each_setting(rank):
    return {name: numbers_of(rank, **config) for name, config in SETTINGS.items()}


@pytest.mark.ranks
def test_ranks_change_nothing():
    expected = each_setting(0)
    ranks = run_on_ranks(2, each_setting)
    for name, (told, parts, metrics) in expected.items():
        held = {}
        for rank in ranks:
            assert rank[name][0] == pytest.approx(told, rel=1e-5), name
            assert rank[name][2] == pytest.approx(metrics, rel=1e-5), name
            held |= rank[name][1]
        assert held.keys() == parts.keys(), name
        for i, (advantage, weight) in parts.items():
            assert held[i][0] == pytest.approx(advantage, rel=1e-5, abs=1e-6)
            assert held[i][1] == (None if weight is None else pytest.approx(weight, rel=1e-5))


def test_the_price_of_kl_is_saved_with_the_position_in_the_prompts():
    def data():
        controller = KLController(KLInReward(coef=0.1, controller="adaptive", target=1.0, horizon=10.0))
        return RLDataModule(None, PromptStream(4, seed=0), None, kl_controller=controller)

    first, second = data(), data()
    first.kl_controller.update(3.0, 5)
    second.load_state_dict(first.state_dict())
    assert second.kl_controller.coef == pytest.approx(0.11)


class Scripted:
    """An engine whose greedy answer is token 7 and whose drawn answers are token 8."""

    version = 0

    def generate(self, requests):
        for r in requests:
            yield Completion(r.sample_id, torch.tensor([7 if r.greedy else 8]), torch.zeros(1), "stop", 0, "")


def test_every_prompt_is_answered_greedily_once_more():
    """The greedy answer is no sample of the iteration; its reward stands beside those of its prompt."""
    prompts = [Prompt(row=i, ids=(i + 1,), text="") for i in range(3)]

    def reward(samples):
        return [RewardResult(s.prompt.row + (0.5 if int(s.response_ids[0]) == 7 else 0.0)) for s in samples]

    draw = RowSampler(PromptStream(3, seed=0), 3, Layout)
    episodes = EpisodeRunner(SingleTurnEpisode, ChatFormat(byte_tokenizer()), 4, 4)
    source = RolloutSource(prompts, draw, 2, episodes, Scripted, reward, seed=0, greedy_baseline=True)
    collected = source.collect(0, Timer())
    assert [s.sample.sample_id for s in collected] == list(range(6))
    assert all(int(s.sample.response_ids[0]) == 8 for s in collected)
    assert all(s.baseline == s.score.value + 0.5 for s in collected)
