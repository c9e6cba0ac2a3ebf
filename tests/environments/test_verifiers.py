"""Environments of ``verifiers``: its own rollout and rubric, with the policy's responses in the place of a model's."""

import sys

import pytest
import torch

from rlmodule.core.episodes import Completion, Done
from rlmodule.core.errors import ConfigError
from tests.environments.plays import prompt_of, said

pytest.importorskip("verifiers")
from rlmodule.environments.verifiers import Verifiers, _loaded

CODE = '''
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"say {word}", "answer": word, "info": {"number": n}} for n, word in enumerate("abcdefgh")]


def right(completion, answer):
    return float(completion[-1].content.strip() == answer)


def length(completion):
    return float(len(completion))


def best_of(completions, answers):
    return [1.0 for _ in completions]


class Hint(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": f"no, it is {state['answer']} ({state['info']['number']})"}]

    @vf.stop
    async def is_right(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]


class Rewrites(Hint):
    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x


def load_environment(kind="hint", max_turns=3):
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    if kind == "group":
        return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[best_of]))
    if kind == "single":
        return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=rubric, system_prompt="be brief")
    if kind == "tool":
        return vf.ToolEnv(tools=[double], dataset=Dataset.from_list(ROWS), rubric=rubric, max_turns=max_turns)
    kinds = {"hint": Hint, "rewrites": Rewrites}
    data = Dataset.from_list(ROWS)
    return kinds[kind](dataset=data, eval_dataset=data.select(range(2)), rubric=rubric, max_turns=max_turns)
'''


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Environments of a module that is there for one test."""
    (tmp_path / "words_for_a_test.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda kind, **keys: Verifiers("words-for-a-test", {"kind": kind}, **keys)
    _loaded.cache_clear()
    sys.modules.pop("words_for_a_test", None)


def test_rows_are_the_environment_s_own(made):
    environment = made("hint", train_size=5)
    train, test = environment.rows("train"), environment.rows("test")
    assert (len(train), len(test)) == (5, 2)
    assert train[0]["prompt"] == [{"role": "user", "content": "say a"}]
    assert [row["answer"] for row in train] == list("abcde")
    apart = made("single", test_size=3)
    assert [row["answer"] for row in apart.rows("train")] == list("abcde"), "the last three are held out"
    assert [row["answer"] for row in apart.rows("test")] == list("fgh")
    assert apart.rows("train")[0]["prompt"][0] == {"role": "system", "content": "be brief"}


def test_turns_and_reward_are_those_of_its_rollout_and_its_rubric(made):
    environment = made("hint")
    row = environment.rows("train")[2]
    first = environment.start(prompt_of(row))
    assert first.prompt.messages == row["prompt"]
    shown, done = (lambda episode: (episode.reply(said("x")), episode.reply(said("c"))))(first)
    assert [dict(message) for message in shown.messages] == [{"role": "user", "content": "no, it is c (2)"}]
    assert done.reward.value == 1.0
    assert done.reward.parts["length"] == 3.0
    assert done.reward.parts["num_turns"] == 2.0


def test_its_own_limit_of_turns_ends_an_episode_and_one_that_is_cut_is_scored(made):
    environment = made("hint")
    episode = environment.start(prompt_of(environment.rows("train")[0]))
    _ = episode.prompt
    assert not isinstance(episode.reply(said("x")), Done)
    assert not isinstance(episode.reply(said("y")), Done)
    assert episode.reply(said("z")).reward.value == 0.0
    other = environment.start(prompt_of(environment.rows("train")[0]))
    _ = other.prompt
    other.reply(said("x"))
    assert other.cut().reward.value == 0.0


def test_its_tools_are_called_as_the_model_writes_calls(made):
    environment = made("tool", observation_role="tool").for_template("<tool_call>")
    row = environment.rows("train")[0]
    assert row["tools"][0]["function"]["name"] == "double"
    call = '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'
    episode = environment.start(prompt_of(row))
    _ = episode.prompt
    reply = episode.reply(Completion(0, torch.tensor([0]), torch.zeros(1), "stop", 0, call, call))
    assert [(m["role"], m["content"]) for m in reply.messages] == [("tool", "42")]
    done = episode.reply(said("a"))
    assert (done.reward.value, done.reward.parts["double_calls"]) == (1.0, 1.0)


def test_bare_arguments_get_their_types_and_malformed_calls_an_error(made):
    """21 is doubled, not written twice; PrimeIntellect-ai/verifiers#1763: a broken call ends no episode."""
    environment = made("tool", observation_role="tool").for_template("<function=")
    episode = environment.start(prompt_of(environment.rows("train")[0]))
    _ = episode.prompt
    for call, shown in (
        ("<function=double><parameter=x>\n21\n</parameter></function>", "42"),
        ("<function=double><parameter=x>21", "Expecting value"),
    ):
        [message] = episode.reply(said(call)).messages
        assert shown in message["content"]
    assert environment.for_template("<tool_call>") == environment, "settled once"


def test_results_shown_as_a_user_are_one_turn(made):
    environment = made("tool").for_template("<tool_call>")
    episode = environment.start(prompt_of(environment.rows("train")[0]))
    _ = episode.prompt
    call = '<tool_call>{"name": "double", "arguments": {"x": 2}}</tool_call>'
    assert list(episode.reply(said(call * 2)).messages) == [{"role": "user", "content": "4\n4"}]


def test_episodes_side_by_side_do_not_meet(made):
    environment = made("hint")
    rows = environment.rows("train")
    episodes = [environment.start(prompt_of(row)) for row in rows]
    assert [episode.prompt.messages[0]["content"][-1] for episode in episodes] == list("abcdefgh")
    for episode in reversed(episodes):
        episode.reply(said("x"))
    assert [e.reply(said(row["answer"])).reward.value for e, row in zip(episodes, rows, strict=True)] == [1.0] * 8


def test_what_cannot_be_run_is_refused_in_words(made):
    with pytest.raises(ConfigError, match="scores a group of responses together"):
        made("group").rows("train")
    with pytest.raises(ConfigError, match=r"environment\.env_id=no-such-thing: verifiers cannot load it"):
        Verifiers("no-such-thing").rows("train")
    environment = made("rewrites")
    with pytest.raises(RuntimeError, match="continued by appending alone"):
        episode = environment.start(prompt_of(environment.rows("train")[0]))
        _ = episode.prompt
        episode.reply(said("x"))
