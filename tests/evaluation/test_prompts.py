"""Several answers to held-out prompts: the same numbers and answers whoever gives which of them."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch

from rlmodule.core.contract import AnswerReward
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.data.chat import ChatFormat
from rlmodule.data.end_tokens import EndTokens
from rlmodule.environments.parts.single_turn import SingleTurnEpisode
from rlmodule.evaluation.config import ValConfig
from rlmodule.evaluation.prompts import PromptEvaluator
from rlmodule.experience.episodes import EpisodeRunner
from rlmodule.rewards.countdown import Countdown
from rlmodule.rewards.exact_match import ExactMatch
from tests.callbacks.builders import TOKENIZER
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import tiny_policy, wrap_here
from tests.rollout.engines import engine_of

TEXTS = ["sort 1", "sort 21", "sort 312", "7", "sort 90", "sort 55", "q"]
ROWS = [Prompt(i, tuple(TOKENIZER.encode(text)), text, "12", source="ab"[i % 2]) for i, text in enumerate(TEXTS)]
SETS = {"first": ROWS[:4], "second": ROWS[4:]}
END = 257


@dataclass(frozen=True)
class EvenTokens:
    """A reward of 0 or 1 that a random model gets, with a component; unscored where a response is empty."""

    knows_one_response: ClassVar[bool] = False

    def __call__(self, samples):
        return [
            RewardResult(float(int(s.response_ids.sum()) % 2 == 0), parts={"length": float(len(s.response_ids))})
            for s in samples
        ]

    def missing_fields(self, answer, columns):
        return None

    def answer_of(self, sample):
        return str(int(sample.response_ids[0]) % 5) if len(sample.response_ids) > 1 else None


def evaluate(rank, config, sets=SETS, reward=EvenTokens()):
    torch.set_num_threads(1)
    policy = tiny_policy(vocab_size=260)
    strategy = wrap_here({"policy": policy})
    made = engine_of(policy, tokenizer=TOKENIZER, ends=EndTokens((END,)), strategy=strategy)
    chat = ChatFormat(TOKENIZER, template=False)
    runner = EpisodeRunner(SingleTurnEpisode, chat, 16, 6)
    answer_of = reward.answer_of if isinstance(reward, AnswerReward) else None
    return PromptEvaluator(sets, runner, lambda: made, reward, strategy, config, answer_of)()


DRAWN = ValConfig(n=4, temperature=0.7, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def alone():
    return evaluate(0, DRAWN)


def test_every_prompt_is_answered_n_times_and_every_answer_is_kept(alone):
    assert [answer.sample_id for answer in alone.answers] == list(range(len(ROWS) * 4))
    assert [answer.prompt_id for answer in alone.answers] == [i // 4 for i in range(len(ROWS) * 4)]
    assert [answer.prompt for answer in alone.answers[::4]] == TEXTS
    assert [answer.dataset for answer in alone.answers[::4]] == ["first"] * 4 + ["second"] * 3
    assert len({answer.response for answer in alone.answers}) > len(ROWS), "they are drawn"
    assert {answer.extracted for answer in alone.answers} > {"1", "2"}


def test_the_numbers_are_those_of_the_answers(alone):
    rewards = [answer.reward for answer in alone.answers]
    assert 0 < sum(rewards) < len(rewards), "otherwise little is shown"
    metrics = alone.metrics
    assert metrics["val/mean@4"] == pytest.approx(sum(rewards) / len(rewards))
    best = [max(rewards[4 * i : 4 * i + 4]) for i in range(len(ROWS))]
    assert metrics["val/best@4"] == metrics["val/pass@4"] == pytest.approx(sum(best) / len(best))
    assert metrics["val/reward/length"] == pytest.approx(math.fsum(a.num_tokens for a in alone.answers) / len(rewards))
    for name in ("val/first/a/maj@4", "val/second/pass@2", "val/first/b/reward/mean/ci95_low"):
        assert name in metrics


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_change_neither_numbers_nor_answers(alone, world_size):
    """Seven prompts do not divide among them; equal, not nearly equal."""
    for result in run_on_ranks(world_size, partial(evaluate, config=DRAWN)):
        assert result == alone


@pytest.mark.ranks
def test_a_rank_without_a_prompt_takes_part():
    one = {"": ROWS[:1]}
    alone = evaluate(0, ValConfig(), one)
    assert len(alone.answers) == 1
    assert run_on_ranks(2, partial(evaluate, config=ValConfig(), sets=one)) == [alone, alone]


@dataclass(frozen=True)
class OneFraction(EvenTokens):
    """0.5 for a single answer of them all, 0 or 1 for the others."""

    def __call__(self, samples):
        return [RewardResult(0.5 if s.sample_id == 1 else float(s.sample_id % 2)) for s in samples]


@pytest.mark.ranks
def test_whether_rewards_are_an_accuracy_is_decided_over_all_ranks():
    """Only the second rank sees the 0.5."""
    for result in run_on_ranks(2, partial(evaluate, config=ValConfig(), reward=OneFraction())):
        assert "val/accuracy" not in result.metrics
        assert result.metrics["val/reward/mean"] == pytest.approx((0.5 + 2) / 7)


def test_drawing_again_gives_the_same_and_another_seed_something_else(alone):
    assert evaluate(0, DRAWN) == alone
    other = evaluate(0, ValConfig(n=4, temperature=0.7, top_p=0.9, seed=4))
    assert [a.response for a in other.answers] != [a.response for a in alone.answers]


def test_a_reward_function_says_answers_where_it_reads_some():
    assert isinstance(ExactMatch(), AnswerReward)
    assert not isinstance(Countdown(), AnswerReward)
