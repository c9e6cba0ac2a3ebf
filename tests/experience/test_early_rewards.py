"""Responses are judged while others are drawn; nothing but the time of it changes."""

import threading
import time
from dataclasses import dataclass, field, replace
from itertools import takewhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.core.contract import SeparateReward
from rlmodule.core.episodes import Completion, Done, Observation
from rlmodule.core.errors import TrainingError
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.data.chat import ChatFormat
from rlmodule.data.stream import PromptStream
from rlmodule.experience.early_rewards import EarlyRewards
from rlmodule.experience.episodes import EpisodeRequest, EpisodeRunner
from rlmodule.experience.sources import RolloutSource, RowSampler, with_rewards
from rlmodule.experience.timer import Timer
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.rewards.code import Code
from rlmodule.rewards.exact_match import ExactMatch
from rlmodule.rewards.function import Function
from rlmodule.rewards.reward_model import RewardModel
from rlmodule.rewards.weighted import Weighted

ROWS = [Prompt(row=i, ids=(65 + i,), text=f"q{i}", answer=str(i)) for i in range(4)]
N = 2
PATIENCE = 30.0  # seconds, after which an event does not come any more


@dataclass
class OneTurn:
    row: Prompt

    @property
    def prompt(self) -> Observation:
        return Observation(ids=self.row.ids)

    def reply(self, completion: Completion) -> Done:
        return Done(None if self.row.row != 2 else RewardResult(-1.0))


@dataclass
class Scripted:
    """Responses in an order of its own; ``before_last`` is called when all but one are there."""

    order: list[int]
    before_last: object = None
    version: int = 0
    drawn: int = field(default=0, init=False)

    def generate(self, requests):
        asked = list(takewhile(lambda request: request is not None, requests))
        for number in self.order:
            request = asked[number]
            if number == self.order[-1] and self.before_last is not None:
                self.before_last()
            self.drawn += 1
            ids = torch.tensor([48 + request.sample_id, 257])
            yield Completion(request.sample_id, ids, torch.zeros(2), "stop", 0, str(request.sample_id))


def source(engine, reward):
    draw = RowSampler(PromptStream(len(ROWS), seed=0, shuffle=False), len(ROWS), Layout)
    episodes = EpisodeRunner(OneTurn, ChatFormat(byte_tokenizer()), 8, 8)
    return RolloutSource(ROWS, draw, N, episodes, lambda: engine, reward, seed=0)


def values(scored):
    return [(s.sample.sample_id, s.score.value) for s in scored]


IN_ORDER = list(range(N * len(ROWS)))
EXPECTED = [(i, -1.0 if i // N == 2 else i / 10) for i in IN_ORDER]


@dataclass
class Watched:
    """Scores a tenth of the sample id; says when it began, and what it was asked together."""

    runs_apart: bool = True
    began: threading.Event = field(default_factory=threading.Event)
    asked: list[int] = field(default_factory=list)

    def __call__(self, samples):
        self.began.set()
        self.asked += [sample.sample_id for sample in samples]
        return [RewardResult(sample.sample_id / 10) for sample in samples]

    knows_one_response = False

    def missing_fields(self, answer, columns):
        return None


def test_the_first_judgement_begins_before_the_last_response_is_there():
    reward, began = Watched(), []
    engine = Scripted(IN_ORDER, lambda: began.append(reward.began.wait(PATIENCE)))
    assert values(source(engine, reward).collect(0, Timer())) == EXPECTED
    assert began == [True]
    assert sorted(reward.asked) == [i for i in IN_ORDER if i // N != 2], "each once"


def test_so_it_is_with_the_processes_of_the_sandbox(tmp_path):
    (tmp_path / "judge_here.py").write_text(
        "import pathlib\n"
        "def score(response, folder, **_):\n"
        "    pathlib.Path(folder, response).touch()\n"
        "    return int(response) / 10\n"
    )
    places, seen = tmp_path / "judged", []
    places.mkdir()

    def wait():
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not any(places.iterdir()):
            time.sleep(0.01)
        seen.append(len(list(places.iterdir())))

    reward = Function(f"{tmp_path}/judge_here.py:score", arguments={"folder": str(places)}, num_workers=1)
    assert values(source(Scripted(IN_ORDER, wait), reward).collect(0, Timer())) == EXPECTED
    assert seen[0] >= 1
    assert len(list(places.iterdir())) == 6


def test_a_reward_of_this_process_is_asked_once_and_for_all_of_them():
    reward = Watched(runs_apart=False)
    engine = Scripted(IN_ORDER, lambda: time.sleep(0.05))
    assert values(source(engine, reward).collect(0, Timer())) == EXPECTED
    assert reward.asked == [0, 1, 2, 3, 6, 7]


@settings(max_examples=25)
@given(st.permutations(IN_ORDER))
def test_the_order_in_which_responses_end_is_no_matter(order):
    assert values(source(Scripted(order), Watched()).collect(0, Timer())) == EXPECTED


def finished(engine):
    asked = [EpisodeRequest(row, row.row, row.row) for row in ROWS]
    return EpisodeRunner(OneTurn, ChatFormat(byte_tokenizer()), 8, 8).run(engine, asked)


def test_what_was_not_begun_is_judged_when_it_is_asked_for():
    episodes = finished(Scripted([0, 1, 2, 3]))
    with EarlyRewards(reward := Watched()) as early:
        early.begin(episodes[3])
        assert [s.score.value for s in with_rewards(episodes, early)] == [0.0, 0.1, -1.0, 0.3]
    assert reward.asked == [3, 0, 1]


def test_an_error_of_a_judge_is_raised_when_rewards_are_asked_for():
    class Failing(Watched):
        def __call__(self, samples):
            super().__call__(samples)
            raise TrainingError("the judge is gone")

    reward = Failing()
    engine = Scripted(IN_ORDER, lambda: reward.began.wait(PATIENCE))
    with pytest.raises(TrainingError, match="the judge is gone"):
        source(engine, reward).collect(0, Timer())
    assert engine.drawn == len(IN_ORDER)


def test_no_judge_works_on_when_sampling_has_failed():
    reward = Watched()

    def fail():
        assert reward.began.wait(PATIENCE)
        raise TrainingError("no server is left")

    with pytest.raises(TrainingError, match="no server is left"):
        source(Scripted(IN_ORDER, fail), reward).collect(0, Timer())
    [*left] = [thread for thread in threading.enumerate() if thread.name == "rewards"]
    for thread in left:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_which_rewards_are_judged_apart(tmp_path):
    """A sum, where a part is and the others may be asked in any thread; a model on the device is not."""
    (tmp_path / "judge_there.py").write_text("def score(**_): return 1\n")
    function = Function(f"{tmp_path}/judge_there.py:score", num_workers=1)
    code, text = Code(), ExactMatch()
    assert [isinstance(r, SeparateReward) and r.runs_apart for r in (function, code, text)] == [True, True, False]
    assert not replace(function, on_error="raise").runs_apart
    assert not hasattr(RewardModel, "runs_apart")
    assert Weighted({"code": code, "text": text}).runs_apart
    assert not Weighted({"text": text}).runs_apart
    assert not Weighted({"code": code, "own": lambda samples: []}).runs_apart
