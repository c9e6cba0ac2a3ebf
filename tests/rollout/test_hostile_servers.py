"""Servers that answer wrongly, in part, late or too often with an error: words instead of a traceback, and no sample lost.

The small server has its answers changed after it was measured and proven, so nothing but the answer itself is wrong.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from rlmodule.core.errors import ConfigError, EnginesGoneError, TrainingError
from rlmodule.rollout.parts import server_checks, server_engine
from rlmodule.rollout.parts.http_client import TRIES
from rlmodule.rollout.parts.routing import ATTEMPTS
from rlmodule.rollout.server import ServerRolloutConfig
from tests.helpers.runs import run_small
from tests.helpers.tiny import tiny_policy
from tests.rollout.engines import generate
from tests.rollout.parts.test_server_engine import KEYS, server_for
from tests.rollout.served import FEW_DRAWS, served
from tests.rollout.test_vllm import requests_of, tokens_of


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_checks, "DRAWS", FEW_DRAWS)
    monkeypatch.setattr(server_engine, "GRACE_SECONDS", 5.0)


def edited(path: str, edit: Callable[[Any], object]) -> Callable[..., Any]:
    """Answers at ``path`` with something put right in the middle of them."""

    def changed(asked: str, body: Any, found: Any, to: Any) -> Any:
        if asked == path:
            found = copy.deepcopy(found)
            edit(found)
        return found

    return changed


def of_choice(**values: Any) -> Callable[..., Any]:
    """Completions whose choice says something else."""
    return edited("/v1/completions", lambda found: found["choices"][0].update(values))


def first_logprob(value: Any) -> Callable[..., Any]:
    def edit(found: Any) -> None:
        found["choices"][0]["logprobs"]["token_logprobs"][0] = value

    return edited("/v1/completions", edit)


def first_token(value: Any) -> Callable[..., Any]:
    def edit(found: Any) -> None:
        found["choices"][0]["token_ids"][0] = value

    return edited("/v1/completions", edit)


def last_dropped(found: Any) -> None:
    found["choices"][0]["token_ids"].pop()
    found["choices"][0]["logprobs"]["token_logprobs"].pop()


ANSWERS = {
    "log-probability null": (first_logprob(None), TrainingError, "log-probabilities, which are numbers"),
    "log-probability as text": (first_logprob("low"), TrainingError, "log-probabilities, which are numbers"),
    "log-probability NaN": (first_logprob(float("nan")), ConfigError, "log-probabilities .nan"),
    "token as text": (first_token("5"), TrainingError, "which are numbers"),
    "half a token": (first_token(5.5), TrainingError, "which are numbers"),
    "token beyond the vocabulary": (first_token(10**6), ConfigError, "token 1000000, and the policy has the tokens 0"),
    "negative token": (first_token(-1), ConfigError, "token -1"),
    "nothing": (of_choice(token_ids=[], logprobs={"token_logprobs": []}), ConfigError, "answered with 0 tokens"),
    "cut, and says that it ended": (
        edited("/v1/completions", last_dropped),
        ConfigError,
        "which is no end token of the run",
    ),
    "no choice": (edited("/v1/completions", lambda found: found.clear()), TrainingError, "without one choice"),
    "a choice of text": (of_choice(logprobs=[1.0]), TrainingError, "without token ids"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_cannot_be_right_ends_the_run_in_words(tmp_path, name):
    changed, kind, words = ANSWERS[name]
    with served(tiny_policy(), tmp_path) as (run, [server]):
        engine = run.engine()
        server.changed = changed
        with pytest.raises(kind, match=words):
            generate(engine, requests_of(2))


def asked_otherwise(server: Any, **changes: Callable[[Any], Any]) -> None:
    """Have a server draw for another request than it was sent."""
    real = server.draw
    server.draw = lambda ask: real({**ask, **{name: change(ask[name]) for name, change in changes.items()}})


def biased(server: Any) -> None:
    real = server.model.next_logits

    def logits(ids: tuple[int, ...], *, is_prompt: bool) -> Any:
        found = real(ids, is_prompt=is_prompt).clone()
        found[7] += 2.0
        return found

    server.model.next_logits = logits


SETTINGS = {
    "a token before the prompt": lambda server: asked_otherwise(server, prompt=lambda ids: [2, *ids]),
    "a template behind it": lambda server: asked_otherwise(server, prompt=lambda ids: [*ids, 3]),
    "top-k by default": lambda server: asked_otherwise(server, top_k=lambda k: k or 20),
    "a bias": biased,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_server_with_settings_of_its_own_is_not_the_policy(tmp_path, name):
    with served(tiny_policy(), tmp_path) as (run, [server]):
        SETTINGS[name](server)
        with pytest.raises(TrainingError, match="does not have the policy's weights of version 0"):
            run.engine()


def test_one_stale_server_of_two_is_found_and_named(tmp_path):
    with served(tiny_policy(), tmp_path, servers=2) as (run, servers):
        run.engine()
        run.train()
        servers[1].model.faults.add("no_reload")
        with pytest.raises(TrainingError, match=f"weights of version 1: {servers[1].url}"):
            run.engine()


@pytest.mark.parametrize("logprob", [None, "low", {}], ids=str)
def test_scores_that_are_no_numbers_end_the_proof_in_words(tmp_path, logprob):
    def edit(found: Any) -> None:
        for place in (found["choices"][0]["prompt_logprobs"] or [])[1:]:
            place.update({token: {"logprob": logprob} for token in place})

    with served(tiny_policy(), tmp_path) as (run, [server]):
        run.engine()
        run.train()
        server.changed = edited("/v1/completions", edit)
        with pytest.raises(TrainingError, match="without prompt_logprobs, one for each token"):
            run.engine()


def test_a_server_whose_scores_are_not_finite_does_not_come_back(tmp_path):
    with served(tiny_policy(), tmp_path) as (run, [server]):
        engine = run.engine()
        [api] = [place.api for place in engine._running.places]
        assert engine._proof.agrees(api)
        server.model.score = lambda ids: [float("nan")] * (len(ids) - 1)
        assert not engine._proof.agrees(api)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/server_info", {"vllm_config": {"model_config": {"max_model_len": "200"}}}),
        ("/server_info", {"vllm_config": []}),
        ("/v1/models", {"data": ["policy"]}),
        ("/v1/models", []),
        ("/get_server_info", [3]),
        ("/get_server_info", {"context_length": "long", "dtype": None}),
    ],
    ids=str,
)
def test_what_a_server_says_of_itself_in_another_form_is_not_known(tmp_path, path, answer):
    config = ServerRolloutConfig if "get" in path else None
    with served(tiny_policy(), tmp_path, config=config) as (run, [server]):
        server.changed = lambda asked, body, found, to: answer if asked == path else found
        assert len(generate(run.engine(), requests_of(2))) == 2


def refused(to: Any, status: int, **headers: str) -> None:
    to.send_response(status)
    for name, value in {"Content-Length": "0", **headers}.items():
        to.send_header(name.replace("_", "-"), value)
    to.end_headers()


def broken_off(to: Any, found: Any) -> None:
    data = json.dumps(found).encode()
    to.send_response(200)
    to.send_header("Content-Length", str(len(data)))
    to.end_headers()
    to.wfile.write(data[: len(data) // 2])
    to.wfile.flush()
    to.close_connection = True
    to.connection.close()


HICCUPS = {
    "busy": lambda to, found: refused(to, 429, Retry_After="0"),
    "busy, by another status": lambda to, found: refused(to, 503, Retry_After="0"),
    "without an answer": lambda to, found: refused(to, 502),
    "broken off in the middle": broken_off,
    "failed": lambda to, found: refused(to, 500),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Responses before and after an update."""
    with served(tiny_policy(), tmp_path_factory.mktemp("well")) as (run, _):
        first = tokens_of(generate(run.engine(), requests_of(8)))
        run.train()
        return [first, tokens_of(generate(run.engine(), requests_of(8)))]


@pytest.mark.parametrize("name", HICCUPS)
def test_a_server_that_now_and_then_fails_costs_no_sample_and_changes_none(tmp_path, expected, name):
    """Every fifth answer, to whatever was asked: checks, proofs and loads of weights too."""
    with served(tiny_policy(), tmp_path) as (run, [server]):
        count, lock = [0], threading.Lock()

        def changed(asked: str, body: Any, answer: Any, to: Any) -> Any:
            with lock:
                count[0] += 1
                is_due = count[0] % 5 == 0
            return HICCUPS[name](to, answer) if is_due else answer

        server.changed = changed
        found = [tokens_of(generate(run.engine(), requests_of(8)))]
        run.train()
        found.append(tokens_of(generate(run.engine(), requests_of(8))))
    assert found == expected


@pytest.mark.parametrize("name", ["failed", "without an answer", "broken off in the middle"])
def test_a_request_that_fails_for_good_ends_the_run_in_words_and_after_few_tries(tmp_path, name):
    """Others are answered meanwhile."""
    with served(tiny_policy(), tmp_path) as (run, [server]):
        engine, asked = run.engine(), list[int]()
        requests = requests_of(4)
        poison = list(requests[1].prompt_ids)

        def changed(path: str, body: Any, answer: Any, to: Any) -> Any:
            if body.get("prompt") != poison:
                return answer
            asked.append(1)
            return HICCUPS[name](to, answer)

        server.changed = changed
        with pytest.raises(TrainingError, match=r"(failed at|lost) a request \d+ times"):
            generate(engine, requests)
        assert 2 <= len(asked) <= TRIES * ATTEMPTS


def test_a_server_that_answers_nothing_any_more_ends_the_run_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(server_engine, "GRACE_SECONDS", 0.5)
    with served(tiny_policy(), tmp_path) as (run, [server]):
        engine = run.engine()
        server.changed = lambda asked, body, answer, to: refused(to, 500)
        with pytest.raises(EnginesGoneError, match=r"no rollout server is left .* 500"):
            generate(engine, requests_of(4))


def test_an_answer_in_pieces_is_read_and_one_that_drips_is_given_up_in_time(tmp_path):
    def in_pieces(asked: str, body: Any, found: Any, to: Any) -> None:
        data = json.dumps({**found, "note": "ü ⟂ 😀"}, ensure_ascii=False).encode()
        to.send_response(200)
        to.send_header("Transfer-Encoding", "chunked")
        to.end_headers()
        for start in range(0, len(data), 7):
            piece = data[start : start + 7]
            to.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        to.wfile.write(b"0\r\n\r\n")

    def dripping(asked: str, body: Any, found: Any, to: Any) -> None:
        to.send_response(200)
        to.send_header("Content-Length", "1000")
        to.end_headers()
        with suppress(OSError):  # nobody listens any more
            for _ in range(100):
                to.wfile.write(b" ")
                to.wfile.flush()
                time.sleep(0.05)

    with served(tiny_policy(), tmp_path, timeout_seconds=0.5) as (run, [server]):
        engine = run.engine()
        expected = tokens_of(generate(engine, requests_of(4)))
        server.changed = in_pieces
        assert tokens_of(generate(engine, requests_of(4))) == expected
        server.changed = lambda asked, body, found, to: (
            dripping(asked, body, found, to) if asked == "/v1/completions" else found
        )
        began = time.monotonic()
        run.train()
        with pytest.raises(TrainingError, match="not whole in time"):
            run.engine()
        assert time.monotonic() - began < 30


@pytest.mark.filterwarnings("ignore")
def test_responses_that_are_not_the_policy_s_are_not_trained_on_where_the_proof_sees_nothing(tmp_path):
    """A penalty that begins after the tokens that a proof draws; the trainer's own scores show it."""
    server = server_for(tmp_path, "rollout.max_response_length=14")
    model, count = server.model, threading.local()
    real = model.next_logits

    def late(ids: tuple[int, ...], *, is_prompt: bool) -> Any:
        count.drawn = 0 if is_prompt else count.drawn + 1
        logits = real(ids, is_prompt=is_prompt).clone()
        if count.drawn > 8:
            logits[list(set(ids))] -= 3.0
        return logits

    model.next_logits = late
    with pytest.raises(TrainingError, match="responses are not of the policy's weights of version"):
        run_small(tmp_path / "run", *KEYS, "rollout.max_response_length=14", f"rollout.url={server.url}")
    server.close()


def from_a_cache() -> Callable[..., Any]:
    """Of all requests with a prompt the first one is answered, and the others are told the same."""
    known: dict[str, Any] = {}
    return lambda asked, body, found, to: (
        known.setdefault(str(body["prompt"]), found) if asked == "/v1/completions" else found
    )


def one_behind() -> Callable[..., Any]:
    """Every request is told what the one before was."""
    last: list[Any] = []

    def changed(asked: str, body: Any, found: Any, to: Any) -> Any:
        if asked != "/v1/completions":
            return found
        last.append(found)
        return last[max(len(last) - 2, 0)]

    return changed


@pytest.mark.parametrize("fault", [from_a_cache, one_behind])
def test_a_server_that_begins_to_give_responses_twice_ends_the_run_in_words(tmp_path, fault):
    with served(tiny_policy(), tmp_path) as (run, [server]):
        engine = run.engine()
        requests = [replace(r, prompt_ids=requests_of(1)[0].prompt_ids) for r in requests_of(12)]
        assert len(generate(engine, requests)) == 12
        assert len(generate(engine, [replace(r, greedy=True) for r in requests])) == 12
        server.changed = fault()
        with pytest.raises(TrainingError, match=r"give responses twice: sample \d+ has that of sample \d+"):
            generate(engine, requests)


@pytest.mark.filterwarnings("ignore")
def test_another_request_s_response_is_not_trained_on(tmp_path):
    """In the second iteration each is told what another was told before; the trainer's own scores show it."""
    sharper = "+model.architecture.initializer_range=0.3"  # the responses to two prompts are alike for a flat policy
    keys = (sharper, "rollout.max_response_length=14")
    server = server_for(tmp_path, *keys)
    late, lock = list[Any](), threading.Lock()

    def changed(asked: str, body: Any, found: Any, to: Any) -> Any:
        if asked != "/v1/completions" or body["max_tokens"] != 14 or not body["temperature"]:  # proofs, validation
            return found
        with lock:
            late.append(found)
            return late[-9] if len(late) > 8 else found

    server.changed = changed
    with pytest.raises(TrainingError, match="responses are not of the policy's weights of version"):
        run_small(tmp_path / "run", *KEYS, *keys, f"rollout.url={server.url}")
    server.close()
