"""Episodes on a server that speaks OpenEnv's protocol over a socket; with the package itself where it is installed."""

import json
import threading

import pytest

from rlmodule.core.episodes import Done
from rlmodule.core.errors import ConfigError
from tests.environments.plays import prompt_of, said

pytest.importorskip("websockets", reason="environment=openenv needs the extra openenv")
from rlmodule.environments.openenv import OpenEnv


def answer(state, message):
    """What a server says to one message: echo what is said, three times at most, each worth its length."""
    kind, data = message["type"], message["data"]
    if kind == "reset":
        state["seed"], state["steps"] = data["seed"], 0
        return {
            "type": "observation",
            "data": {"observation": {"prompt": f"seed {data['seed']}", "n": 1}, "done": False},
        }
    if data.get("message") == "bad":
        return {"type": "error", "data": {"message": "no such action", "code": "EXECUTION_ERROR"}}
    state["steps"] += 1
    observation = {"echoed": data["message"], "steps": state["steps"]}
    content = {"observation": observation, "reward": len(data["message"]), "done": state["steps"] == 3}
    return {"type": "observation", "data": content}


@pytest.fixture(scope="module")
def server():
    """A server of our own, at a port of the system's choice."""
    from websockets.sync.server import serve

    open_sessions = []

    def handle(socket):
        state = {}
        open_sessions.append(socket)
        for text in socket:
            message = json.loads(text)
            if message["type"] == "close":
                break
            socket.send(json.dumps(answer(state, message)))
        open_sessions.remove(socket)

    with serve(handle, "127.0.0.1", 0) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.socket.getsockname()[1]}", open_sessions
        made.shutdown()


def test_a_session_is_an_episode(server):
    url, open_sessions = server
    made = OpenEnv(url)
    row = made.rows("train")[4]
    episode, other = made.start(prompt_of(row)), made.start(prompt_of(made.rows("test")[0]))
    assert [dict(m) for m in episode.prompt.messages] == [{"role": "user", "content": "seed 4"}]
    assert other.prompt.messages[0]["content"] == f"seed {1 << 30}"
    replies = [episode.reply(said(text)) for text in ("a", "bc", "def")]
    assert [reply.messages[0]["content"] for reply in replies[:2]] == ["a", "bc"]
    assert [reply.reward for reply in replies[:2]] == [1.0, 2.0]
    assert isinstance(replies[2], Done)
    assert replies[2].reward.value == 3.0
    with pytest.raises(RuntimeError, match="no such action"):
        other.reply(said("bad"))
    other.cut()
    for _ in range(100):
        if not open_sessions:
            break
        threading.Event().wait(0.02)
    assert not open_sessions, "every session is closed"


def test_what_is_shown_is_a_text_a_named_field_or_all_of_it():
    url = "http://localhost:1"
    assert OpenEnv(url).shown({"a": "x", "b": 1}) == "x"
    assert OpenEnv(url).shown({"a": "x", "b": "y"}) == '{"a": "x", "b": "y"}'
    assert OpenEnv(url, observation_key="b").shown({"a": "x", "b": "y"}) == "y"
    assert OpenEnv("https://h:1/").socket_url == "wss://h:1/ws"


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="url=localhost"):
        OpenEnv("localhost:8000")


def test_the_package_s_own_server_is_understood():
    """A small environment served by ``openenv-core``."""
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    import socket
    import time

    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, create_app

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Heard(text=f"seed {seed}")

        def step(self, action, timeout_s=None, **kwargs):
            return Heard(text=action.message, reward=1.0, done=action.message == "end")

        @property
        def state(self):
            return {}

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_app(Echo, Say, Heard, env_name="echo", max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    made = OpenEnv(f"http://127.0.0.1:{port}")
    first, second = (made.start(prompt_of(row)) for row in made.rows("train")[:2])
    assert [e.prompt.messages[0]["content"] for e in (first, second)] == ["seed 0", "seed 1"]
    assert first.reply(said("a")).messages[0]["content"] == "a"
    end = first.reply(said("end"))
    assert isinstance(end, Done)
    assert end.reward.value == 1.0
    assert isinstance(second.cut(), Done)
    server.should_exit = True
    thread.join()
