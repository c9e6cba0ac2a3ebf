"""Whatever an environment gives in the place of what is due costs its own episode: no traceback, no number of another."""

from __future__ import annotations

import pytest
import torch

from rlmodule.core.episodes import STOP, Completion, Done, Observation
from rlmodule.core.errors import DataError
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.data.chat import ChatFormat
from rlmodule.experience.episodes import EpisodeRequest, EpisodeRunner
from rlmodule.experience.failures import reward_counts
from rlmodule.experience.gathering import gather_sample_info
from rlmodule.experience.iteration_metrics import length_metrics, reward_metrics
from rlmodule.experience.sources import with_rewards
from rlmodule.models.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from tests.helpers.tiny import single, tiny_policy

CHAT = ChatFormat(byte_tokenizer())
END, USER, ASSISTANT = 257, 258, 259
COLLECTIVES = single({"policy": tiny_policy()}).collectives
PROMPT = Observation(ids=(USER, 97, ASSISTANT))
ROWS = [Prompt(row=i, ids=(USER, 97, ASSISTANT), text="a", source="test") for i in range(3)]
AGAIN = {"role": "user", "content": "again"}


class Scripted:
    """A policy that says ``ab`` to everything."""

    version = 0

    def generate(self, requests):
        waiting = iter(requests)
        while (asked := next(waiting, None)) is not None:
            yield Completion(asked.sample_id, torch.tensor([97, 98, END]), torch.full((3,), -1.0), STOP, 0, "ab")


class Played:
    """An episode that gives what it was made with."""

    def __init__(self, prompt=PROMPT, first=None, then=None, cut=None):
        self._prompt, self.replies, self.at_cut = prompt, [first, then or Done(RewardResult(1.0))], cut

    @property
    def prompt(self):
        return self._prompt

    def reply(self, completion):
        first, self.replies[0] = self.replies[0], None
        return first if first is not None else self.replies[1]

    def cut(self):
        return self.at_cut


def numbers_beside(chat=CHAT, **strange):
    """(sample, result, every number of the iteration) with one strange episode among others."""

    def start(row):
        return Played(**strange) if row.row == 1 else Played()

    runner = EpisodeRunner(start, chat, 50, 60)
    found = runner.run(Scripted(), [EpisodeRequest(row, row.row, row.row) for row in ROWS])
    scored = with_rewards(found, lambda samples: [RewardResult(0.5) for _ in samples])
    _, info = gather_sample_info(lambda: scored, COLLECTIVES)
    return scored[1].sample, scored[1].score, reward_metrics(info) | length_metrics(info) | reward_counts(info)


STRANGE = {
    "the end is a number": ({"then": 1.0}, "an Observation or Done was due"),
    "the reward is no result": ({"then": Done(1.0)}, "is a RewardResult or None"),
    "the reward is NaN": ({"then": Done(RewardResult(float("nan")))}, "the reward is nan"),
    "the reward is infinite": ({"then": Done(RewardResult(float("inf")))}, "the reward is inf"),
    "the reward is text": ({"then": Done(RewardResult("1"))}, "the reward is no number"),
    "a part is text": ({"then": Done(RewardResult(1.0, {"a": "b"}))}, "parts of a reward, a, is no number"),
    "counts are text": ({"then": Done(RewardResult(1.0, counts="x"))}, "numbers by name"),
    "diagnostics are a list": ({"then": Done(RewardResult(1.0), [1])}, "numbers by name"),
    "the reward of a turn is NaN": ({"first": Observation(messages=[AGAIN], reward=float("nan"))}, "of a turn is nan"),
    "the reward of a turn is text": ({"first": Observation(messages=[AGAIN], reward="x")}, "of a turn is no number"),
    "a token beyond the vocabulary": ({"first": Observation(ids=(1000,))}, "has token 1000"),
    "a negative token": ({"first": Observation(ids=(-1,))}, "has token -1"),
    "half a token": ({"first": Observation(ids=(1.5,))}, "whole numbers"),
    "no token": ({"first": Observation(ids=())}, "is empty"),
    "no message": ({"first": Observation(messages=[])}, "at least one"),
    "text for messages": ({"first": Observation(messages="again")}, "at least one"),
    "text for a message": ({"first": Observation(messages=["again"])}, "a role and content"),
    "no role": ({"first": Observation(messages=[{"content": "x"}])}, "a role and content"),
    "no content": ({"first": Observation(messages=[{"role": "user"}])}, "content of a message is text"),
    "a number for content": ({"first": Observation(messages=[AGAIN | {"content": 3}])}, "content of a message is text"),
    "half a character": ({"first": Observation(messages=[AGAIN | {"content": "\ud83d"}])}, "half of a surrogate pair"),
    "bytes for content": ({"first": Observation(messages=[AGAIN | {"content": b"x"}])}, "content of a message is text"),
    "an image": (
        {"first": Observation(messages=[AGAIN | {"content": [{"type": "image"}]}])},
        "content of a message is",
    ),
    "half a character in a name": (
        {"first": Observation(messages=[AGAIN | {"name": "\ud83d"}])},
        "half of a surrogate",
    ),
    "half a character in a part": (
        {"first": Observation(messages=[AGAIN | {"content": [{"type": "text", "text": "\ud83d"}]}])},
        "half of a surrogate",
    ),
    "the prompt is the end": ({"prompt": Done(RewardResult(1.0))}, "was due"),
    "the prompt is nothing": ({"prompt": None}, "was due"),
    "the prompt is empty": ({"prompt": Observation(ids=())}, "is empty"),
    "the cut is an observation": ({"first": Observation(ids=(97,) * 99), "cut": PROMPT}, "is no Done"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_wrong_value_costs_its_episode_and_is_told(name):
    strange, words = STRANGE[name]
    sample, result, found = numbers_beside(**strange)
    assert result.value is None
    assert words in result.failure
    assert "episode of row 2 of test" in result.failure
    assert all(0 <= token < 260 for token in (*sample.prompt.ids, *sample.response_ids.tolist()))
    assert found["reward/failed"] == 1.0
    whole = numbers_beside()[2]
    assert (found.pop("reward/unscored"), whole.pop("reward/unscored")) == (1.0, 0.0)
    shared = found.keys() & whole.keys()
    assert {name: found[name] for name in shared} == {name: whole[name] for name in shared}


def chat_that_refuses(wrong):
    tokenizer = byte_tokenizer()
    raises = "{%- if WRONG -%}{{- raise_exception('not this') -}}{%- endif -%}"
    tokenizer.chat_template = raises.replace("WRONG", wrong) + CHAT_TEMPLATE
    return ChatFormat(tokenizer)


def test_what_the_template_refuses_in_one_message_costs_its_episode():
    """A role that it refuses whatever is said ends the run with the row: no episode could go on."""
    said = Observation(messages=[AGAIN])
    _, result, found = numbers_beside(chat_that_refuses("messages[-1].content == 'again'"), first=said)
    assert "not this" in result.failure
    assert (result.value, found["reward/failed"], found["reward/unscored"]) == (None, 1.0, 1.0)
    with pytest.raises(DataError, match=r"episode of row 2 of test: .*not this"):
        numbers_beside(chat_that_refuses("messages | length > 1"), first=said)


@pytest.mark.parametrize("number", [True, 1, torch.tensor(1.0)], ids=str)
def test_numbers_of_other_kinds_are_numbers(number):
    score = numbers_beside(then=Done(RewardResult(number, {"part": number}), {"seen": number}))[1]
    assert (score.value, type(score.value), score.parts, score.diagnostics["seen"]) == (1.0, float, {"part": 1.0}, 1.0)
    sample = numbers_beside(first=Observation(ids=[USER, torch.tensor(97), ASSISTANT]))[0]
    assert sample.response_ids.tolist() == [97, 98, END, USER, 97, ASSISTANT, 97, 98, END]
