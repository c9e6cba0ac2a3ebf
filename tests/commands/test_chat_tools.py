"""``command=chat`` with the tools of an environment: the tokens of a conversation are those of an episode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from rlmodule.core.episodes import Completion, GenerationRequest
from rlmodule.core.types import Prompt
from rlmodule.data.chat import ChatFormat
from rlmodule.environments.calculator import Calculator
from rlmodule.experience.episodes import EpisodeRequest, EpisodeRunner, EpisodesConfig
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.run.saved.conversation import Conversation
from tests.commands.test_chat import SHORT, engine
from tests.end_to_end.commands import forked

CALL, WRONG = '[calc(x="6*7")]', "[calc(y=1)]"


class Script:
    """An engine that says what it is told, and remembers what it was asked."""

    version = 0

    def __init__(self, *texts: str) -> None:
        self.texts, self.asked = list(texts), list[GenerationRequest]()

    def stream(self, request: GenerationRequest) -> Iterator[int]:
        self.asked.append(request)
        tokenizer = byte_tokenizer()
        return iter([*tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])

    def generate(self, requests: Iterable[GenerationRequest | None]) -> Iterator[Completion]:
        for request in requests:
            if request is not None:
                ids = torch.tensor(list(self.stream(request)))
                text = byte_tokenizer().decode(ids, skip_special_tokens=True)
                yield Completion(request.sample_id, ids, torch.zeros(len(ids)), "stop", 0, str(text))


def conversation(script: Script, environment: Calculator, max_turns: int = 4) -> Conversation:
    made = Conversation(
        ChatFormat(byte_tokenizer()), engine(), 400, 2000, 0, False, tools=environment, max_turns=max_turns
    )
    made.engine.stream = script.stream  # type: ignore[method-assign]
    return made


def test_a_line_is_answered_as_an_episode_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokens are read before every response, and the same random numbers draw it."""
    chat = ChatFormat(byte_tokenizer())
    environment = Calculator(test_size=4, train_size=4).for_template(str(chat.tokenizer.chat_template or ""))
    talking, running = Script(WRONG, CALL, "42"), Script(WRONG, CALL, "42")
    conversation(talking, environment).answer_with(environment, "6 times 7")
    [ids] = chat.encode_prompts([[{"role": "user", "content": "6 times 7"}]], [environment.toolbox.schemas])
    runner = EpisodeRunner(environment.start, chat, 1000, 400, EpisodesConfig(max_turns=4))
    row = Prompt(0, ids, "6 times 7", "42", "calculator", {})
    [episode] = runner.run(running, [EpisodeRequest(row, 1, 1)])  # type: ignore[arg-type]
    assert [vars(request) for request in talking.asked] == [vars(request) for request in running.asked]
    assert episode.reward is not None and episode.reward.value == 1.0
    shown = capsys.readouterr().out
    assert "[calc] error: calc has no argument 'y'" in shown
    assert "[calc] 42\n42\n" in shown


def test_a_later_line_follows_what_was_sampled_and_calls_have_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatFormat(byte_tokenizer())
    environment = Calculator(test_size=4, train_size=4).for_template(str(chat.tokenizer.chat_template or ""))
    script = Script(CALL, "42", "so it is", CALL, CALL)
    talking = conversation(script, environment, max_turns=2)
    talking.talk(iter(["6 times 7", "really?", "6 times 7"]))
    first, second, third = script.asked[1], script.asked[2], script.asked[3]
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert (second.first_position, second.sample_id, third.sample_id) == (0, 2, 3)
    assert "[no answer after 2 responses, environment.max_turns]" in capsys.readouterr().out
    talking.talk(iter(["/reset"]))
    assert not talking.ids


def test_the_command_says_which_tools_there_are(finished_run: Path, tmp_path: Path) -> None:
    words = ("chat", f"model.path={finished_run / 'policy'}", "environment=calculator", *SHORT)
    done = forked(*words, cwd=tmp_path, typed_in="6 times 7\n/quit\n")
    assert done.code == 0, done.text
    assert "tools        calc\n" in done.text
