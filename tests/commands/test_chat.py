"""``command=chat`` through a pipe: several turns, its two words, Ctrl-C; and answers that are those of the engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlmodule.commands.chat import Conversation
from rlmodule.core.episodes import GenerationRequest
from rlmodule.core.types import POLICY
from rlmodule.data.chat import ChatFormat
from rlmodule.data.end_tokens import EndTokens
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.rollout.hf import HFEngine
from rlmodule.rollout.parts.sampling import Truncation
from tests.end_to_end.commands import Command, forked, wait_until
from tests.helpers.tiny import single, tiny_policy

SHORT = ("rollout.max_response_length=4", "trainer.num_threads=1")


def test_a_conversation_through_a_pipe(finished_run: Path, tmp_path: Path) -> None:
    said = "sort 31\nand 7\n\n/help\n/reset\nsort 31\n/quit\nnever said\n"
    done = forked("chat", str(finished_run), *SHORT, cwd=tmp_path, typed_in=said)
    assert done.code == 0, done.text
    assert str(finished_run / "policy") in done.text
    assert "there is no /help; there are /reset and /quit" in done.text
    assert "a new conversation" in done.text
    assert done.text.count("[cut after") <= 3, "nothing is answered after /quit, and nothing to an empty line"
    assert {path.name for path in tmp_path.iterdir()} == {"output.txt"}, "nothing is left behind"


def test_the_end_of_input_ends_it_and_a_folder_is_enough(finished_run: Path, tmp_path: Path) -> None:
    for said in ("hello", ""):
        done = forked("chat", f"model.path={finished_run / 'policy'}", *SHORT, cwd=tmp_path, typed_in=said)
        assert done.code == 0, done.text
        assert "Traceback" not in done.text


def test_ctrl_c_stops_an_answer_and_not_the_program(finished_run: Path, tmp_path: Path) -> None:
    """A long answer is stopped on its way; the next line is answered."""
    words = [
        "chat",
        str(finished_run),
        "rollout.max_response_length=200",
        "rollout.temperature=1.0",
        "trainer.num_threads=1",
    ]
    running = Command(words, tmp_path, typed_in="sort 1\n/reset\n" * 4)
    wait_until(lambda: running.log.read_bytes().partition(b"stops an answer\n")[2] != b"", running)
    os.kill(running.pid, signal.SIGINT)
    done = running.wait()
    assert done.code == 0, done.text
    assert done.text.count("[stopped]") == 1
    assert done.text.count("a new conversation\n") == 4, "the lines after it are answered"


def engine(family: str = "qwen3") -> HFEngine:
    policy, tokenizer = tiny_policy(family, vocab_size=260, max_position_embeddings=64), byte_tokenizer()
    strategy = single({POLICY: policy})
    return HFEngine(
        lambda: strategy.generator(POLICY), lambda: strategy.generation_mode(POLICY), tokenizer, strategy.root_device,
        EndTokens((257,)), Truncation(), 8,
    )  # fmt: skip


def test_streamed_tokens_are_those_of_the_engine() -> None:
    talking = engine()
    for sample_id in range(5):
        request = GenerationRequest((258, 65, 66, 259), sample_id, 0, max_tokens=12, seed=3)
        [whole] = talking.generate([request])
        assert list(talking.stream(request)) == whole.token_ids.tolist()


def test_a_later_turn_sees_the_earlier_ones_and_a_full_conversation_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(ChatFormat(byte_tokenizer()), engine(), 8, 64, seed=0, greedy=False)
    conversation.answer("one")
    conversation.answer("two")
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant"] * 2
    shown = capsys.readouterr().out
    for message in conversation.messages[1::2]:
        assert str(message["content"]) in shown
    before = len(conversation.messages)
    conversation.answer("x" * 60)
    assert "the model has 64 positions; /reset begins a new one" in capsys.readouterr().out
    assert len(conversation.messages) == before, "the line that found no room is dropped"


def test_characters_of_several_bytes_are_written_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """The byte tokenizer needs three tokens for one of them; no replacement character is ever shown."""
    conversation = Conversation(ChatFormat(byte_tokenizer()), engine(), 8, 64, seed=0, greedy=False)
    pieces: list[str] = []
    spoken = [*"€ué".encode(), 257]
    conversation.engine.stream = lambda request: iter(spoken)  # type: ignore[method-assign, assignment, return-value]
    text = conversation._printed(GenerationRequest((65,), 0, 0, max_tokens=20), pieces.append)
    assert text == "€ué"
    assert "".join(pieces) == "€ué\n"
    assert not any("\ufffd" in piece for piece in pieces)
    assert "€" in pieces


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.path=nowhere"], "model.path=nowhere: no model configuration can be read there"),
        (["{run}", "model.kind=reward_model"], "command=chat samples responses, and a reward model gives none"),
        (["{run}/policy2"], "there is nothing there"),
        (["{run}", "command.greedy=perhaps"], "command.greedy=perhaps"),
    ],
)
def test_bad_input_gets_words(finished_run: Path, tmp_path: Path, words: list[str], says: str) -> None:
    done = forked("chat", *(word.format(run=finished_run) for word in words), cwd=tmp_path)
    assert done.code == 2, done.text
    assert says in done.text
