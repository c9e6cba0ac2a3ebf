"""A real HTTP server on the loopback device stands for the language model."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlmodule import cli
from rlmodule.commands.generate import Generate
from rlmodule.commands.train import fit
from rlmodule.core.errors import ConfigError
from rlmodule.records.run_directory import RunDirectory
from rlmodule.rewards.llm_judge import LLMJudge
from rlmodule.run.evaluation_run import EvaluationRun
from rlmodule.run.preflight.responses import check_reward_server
from rlmodule.run.run import Run
from rlmodule.run.saved.policy_source import Place
from strategies.registry import STRATEGIES
from tests.helpers.composing import compose
from tests.rewards.samples import sample


@contextmanager
def server(*answers):
    """Gives each answer once and the last one for ever: a text, a status with headers, or a function of the handler."""
    seen, left, lock = [], list(answers), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.append((self.path, dict(self.headers), body))
                answer = left.pop(0) if len(left) > 1 else left[0]
            if callable(answer):
                answer(self)
                return
            status, headers, text = answer if isinstance(answer, tuple) else (200, {}, reply(answer))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(text)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}/v1", seen
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def reply(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def judged(url, *samples, **keys):
    reward = LLMJudge(url=url, model="grader", **{"retry_seconds": 0.01, "timeout_seconds": 5, **keys})
    return reward(samples or [sample("It is 4.", "4", prompt="2+2?")])


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Score: 10", 1.0),
        ("good\nScore: 7.5", 0.75),
        ("**Score:** 7", 0.7),
        ("score = 0", 0.0),
        ("Score - 4/10", 0.4),
        ("Score: 3 ... no.\nScore: 9", 0.9),
        ("<think>Score: 2</think>\nScore: 8", 0.8),
        ('{"score": 6}', 0.6),
    ],
)
def test_the_last_score_of_a_reply_counts(said, score):
    with server(said) as (url, _):
        [result] = judged(url)
    assert (result.value, result.failure) == (score, None)


@pytest.mark.parametrize("said", ["no idea", "", "Score: 11", "Score: -1", "Score: high", "<think>Score: 5</think>"])
def test_a_reply_without_a_score_leaves_the_response_unscored(said):
    with server(said) as (url, seen):
        [result] = judged(url, retries=1)
    assert result.value is None
    assert result.counts == {"failed": 1.0, "timed_out": 0.0}
    assert "replied without a score" in (result.failure or "")
    assert len(seen) == 2


def test_what_is_asked():
    with server("Score: 5") as (url, seen):
        judged(url, sample("Braces {prompt} and \ud800", "4", prompt="2+2?"), temperature=0.5, max_tokens=7)
    [(path, headers, body)] = seen
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("grader", 0.5, 7)
    [turn] = body["messages"]
    assert "2+2?" in turn["content"]
    assert "Braces {prompt} and" in turn["content"], "what a response says is not filled in"
    assert "Authorization" not in headers


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(status):
    with server((status, {"Retry-After": "0"}, b"busy"), "Score: 5") as (url, seen):
        [result] = judged(url)
    assert (result.value, len(seen)) == (0.5, 2)


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_final(status):
    with server((status, {}, b"wrong model")) as (url, seen):
        [result] = judged(url)
    assert len(seen) == 1
    assert f"refused with {status}: wrong model" in (result.failure or "")


def test_no_redirect_is_followed_with_the_key(monkeypatch):
    monkeypatch.setenv("GRADER_KEY", "sk-123")
    with (
        server("Score: 10") as (other, taken),
        server((307, {"Location": f"{other}/chat/completions"}, b"")) as (url, _),
    ):
        [result] = judged(url, api_key_env="GRADER_KEY", retries=0)
    assert result.value is None
    assert not taken


def test_the_key_is_sent_and_never_said(monkeypatch):
    monkeypatch.setenv("GRADER_KEY", "sk-123")
    with server((400, {}, b"bad key sk-123")) as (url, seen):
        reward = LLMJudge(url=url, model="grader", api_key_env="GRADER_KEY")
        [result] = reward([sample("x")])
    assert seen[0][1]["Authorization"] == "Bearer sk-123"
    assert "*****" in (result.failure or "")
    assert "sk-123" not in f"{result}{reward}"


@pytest.mark.parametrize("value", ["sk-123\nmore", "sk-123 more", "sk-123\u00e9"], ids=repr)
def test_a_key_that_cannot_be_sent_is_refused_and_not_repeated(monkeypatch, value):
    monkeypatch.setenv("GRADER_KEY", value)
    with pytest.raises(ConfigError, match="no HTTP header can") as caught:
        LLMJudge(url="http://h/v1", model="m", api_key_env="GRADER_KEY").check_here("reward")
    assert "sk-123" not in str(caught.value)


def test_a_key_is_sent_without_the_line_break_behind_it(monkeypatch):
    monkeypatch.setenv("GRADER_KEY", "sk-123\n")
    with server("Score: 10") as (url, seen):
        [result] = judged(url, api_key_env="GRADER_KEY", retries=0)
    assert seen[0][1]["Authorization"] == "Bearer sk-123"
    assert result.value == 1.0


@pytest.mark.timeout(30)
def test_a_server_that_does_not_reply_costs_its_time():
    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(40):
            try:
                handler.wfile.write(b" ")
                handler.wfile.flush()
            except OSError:
                return
            time.sleep(0.1)

    before = time.monotonic()
    with server(lambda handler: time.sleep(1.5)) as (url, _):
        [silent] = judged(url, timeout_seconds=0.3, retries=1)
    with server(drip) as (url, _):
        [slow] = judged(url, timeout_seconds=0.3, retries=0)
    assert time.monotonic() - before < 10
    assert [result.counts for result in (silent, slow)] == [{"failed": 1.0, "timed_out": 1.0}] * 2
    assert "no reply within 0.3 seconds" in (silent.failure or "")


@pytest.mark.parametrize(
    "answer",
    [
        (200, {}, b"<html>"),
        (200, {}, b"{}"),
        (200, {}, b'{"choices": [{"message": {"content": null}}]}'),
        (200, {}, b""),
    ],
)
def test_a_server_of_another_kind_is_named(answer):
    with server(answer) as (url, _):
        [result] = judged(url, retries=0)
    assert result.value is None
    assert url in (result.failure or "")


def test_no_server_at_all():
    [result] = judged("http://127.0.0.1:9/v1", retries=1)
    assert "no connection" in (result.failure or "")


def test_requests_run_at_a_time_and_scores_keep_their_places():
    def slow(handler):
        time.sleep(0.3)
        text = reply("Score: 5")
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    before = time.monotonic()
    with server(slow) as (url, seen):
        cut = sample("x", finish_reason="length")
        results = judged(url, *[sample(str(i)) for i in range(16)], cut)
    assert time.monotonic() - before < 4.5
    assert [result.value for result in results] == [0.5] * 16 + [0.0]
    assert len(seen) == 16, "a response that was cut is not asked about"


def test_a_template_of_one_s_own_and_a_long_response(tmp_path):
    file = tmp_path / "ask.txt"
    file.write_text("Is {response} like {answer}? 1 or 0")
    with server("1") as (url, seen):
        [result] = judged(
            url, sample("x" * 100_000, "y"), template=str(file), pattern="([01])", highest=1, longest_response=200
        )
    assert result.value == 1.0
    asked = seen[0][2]["messages"][0]["content"]
    assert len(asked) < 300
    assert asked.endswith("like y? 1 or 0")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"url": "localhost:8000"}, "it is no address of a server"),
        ({"pattern": "["}, "it is no regular expression"),
        ({"pattern": "[0-9]+"}, "it has no group"),
        ({"lowest": 5, "highest": 5}, "greater than 5"),
        ({"template": "/nowhere"}, "it cannot be read"),
        ({"template": __file__[:-3] + "x"}, "it cannot be read"),
        ({"num_requests": 0}, "at least 1"),
    ],
)
def test_keys_are_checked(keys, says):
    with pytest.raises(ConfigError) as caught:
        LLMJudge(**{"url": "http://h/v1", "model": "m", **keys})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "key"),
    [("llm_judge", "reward.api_key_env"), ("[llm_judge,format]", "reward.llm_judge.api_key_env")],
)
def test_a_key_is_wanted_where_responses_are_scored_and_nowhere_else(tmp_path, reward, key):
    """A run is read, checked, planned and exported without; whoever scores is told the key of the setting."""
    section = key.rpartition(".")[0]
    words = [f"reward={reward}", f"{section}.url=http://h/v1", f"{section}.model=m", f"{key}=NOT_SET_ANYWHERE"]
    run = Run.read(compose(*cli.with_sums(words)), RunDirectory(tmp_path), STRATEGIES)
    run.check()
    scoring = (
        lambda: check_reward_server(run.config),
        lambda: EvaluationRun(run, run.run_dir).check(),
        lambda: fit(run),
        lambda: Generate(out="out.jsonl", score=True)._checked(Place(run, None, None)),
    )
    for score in scoring:
        with pytest.raises(ConfigError, match="no such environment variable is set") as caught:
            score()
        assert caught.value.key == key
    assert Generate(out="out.jsonl")._checked(Place(run, None, None)).run.config.reward is None


def test_a_key_in_the_place_of_its_name_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        LLMJudge(url="http://h/v1", model="m", api_key_env="sk-123")
    assert "sk-123" not in str(caught.value)


def test_a_template_without_the_response_is_refused(tmp_path):
    file = tmp_path / "ask.txt"
    file.write_text("Is it {answer}?")
    with pytest.raises(ConfigError, match="the response is not in it"):
        LLMJudge(url="http://h/v1", model="m", template=str(file))
