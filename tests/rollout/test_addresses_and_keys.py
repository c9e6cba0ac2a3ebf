"""How servers are reached: addresses, keys and hosts that are wrong are refused in words, and no key is ever said."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.rollout.parts import server_checks, server_engine
from rlmodule.rollout.parts.http_client import HTTPClient, ServerGoneError, ServerRefusedError
from rlmodule.rollout.parts.own_server import OwnServer, free_port
from rlmodule.rollout.parts.vllm_transfer import address_for
from rlmodule.rollout.server import ServerRolloutConfig
from rlmodule.rollout.vllm import VLLMRolloutConfig
from tests.helpers.tiny import tiny_policy
from tests.rollout.engines import generate
from tests.rollout.served import FEW_DRAWS, served
from tests.rollout.test_vllm import requests_of

KEY = "sk-5ecret"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_checks, "DRAWS", FEW_DRAWS)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://a:80000", "Port out of range"),
        ("http://a:port", "Port could not be cast"),
        ("http://a:-1", "Port"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://a..b:8000", "label empty"),
        ("http://a b:8000", "no address of a server"),
        ("http://a:8000?model=x", "no address of a server"),
        ("http://a:8000#x", "no address of a server"),
        ("http://:8000", "no address of a server"),
        ("ftp://a:21", "no address of a server"),
        (["http://a:8000", "http://a:8000/v1/"], "http://a:8000 stands in it twice"),
        ([None], "no address of a server"),
    ],
    ids=str,
)
def test_an_address_that_cannot_be_asked_is_refused_before_anything_starts(url, says):
    for config in (VLLMRolloutConfig, ServerRolloutConfig):
        with pytest.raises(ConfigError, match=says) as caught:
            config(url=url)
        assert caught.value.key == "url"


@pytest.mark.parametrize("host", ["a:8000", "user:pw@a:8000", "pw@a:port"])
def test_a_password_in_an_address_is_refused_and_not_repeated(host):
    if "@" not in host:
        assert VLLMRolloutConfig(url=f"http://{host}").urls == ("http://a:8000",)
        return
    with pytest.raises(ConfigError, match=r"^url=\.\.\.@a:\w+: it holds a name or a password") as caught:
        VLLMRolloutConfig(url=f"http://{host}")
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://[::1]:8000", "https://h", "http://H:1/", "http://h:1/v1", "http://bücher.de:1"]
)
def test_addresses_of_every_kind_will_do(url):
    assert VLLMRolloutConfig(url=url).urls == (url.rstrip("/").removesuffix("/v1"),)


# ---- keys


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SERVER_KEY", None, "no such environment variable is set"),
        ("SERVER_KEY", " \n", "no such environment variable is set"),
        ("SERVER_KEY", f"{KEY}\nsecond line", "holds a line break"),
        ("SERVER_KEY", f"{KEY}é", "beyond ASCII"),
    ],
)
def test_a_key_that_cannot_be_sent_is_refused_and_not_repeated(monkeypatch, name, value, says):
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    for ask in (
        VLLMRolloutConfig(url="http://h:1", api_key_env=name).check_here,
        ServerRolloutConfig(url="http://h:1", api_key_env=name).check_here,
        partial(HTTPClient("http://127.0.0.1:1", api_key_env=name).get, "/health"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            ask()
        assert caught.value.key == "rollout.api_key_env"
        assert KEY not in str(caught.value)


def test_a_key_in_the_place_of_its_name_is_not_repeated():
    with pytest.raises(ConfigError, match="the name of an environment variable") as caught:
        ServerRolloutConfig(url="http://h:1", api_key_env=KEY)
    assert KEY not in str(caught.value)


def test_a_key_is_sent_without_the_line_break_behind_it_and_is_not_said_where_a_server_repeats_it(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", f"{KEY}\n")
    says = r"401 bad key \*\*\*\*\*\. rollout\.api_key_env names"
    with answering(401, f"bad key {KEY}") as (url, headers), pytest.raises(ServerRefusedError, match=says) as caught:
        HTTPClient(url, api_key_env="SERVER_KEY").get("/v1/models")
    assert headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(caught.value)


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch):
    """Servers are in one's own network."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(200, "{}") as (url, headers):
        HTTPClient(url).get("/health")
    assert len(headers) == 1


# ---- waiting


def test_a_request_that_is_broken_off_while_it_connects_is_not_waited_for(monkeypatch):
    with answering(200, "{}") as (url, _):
        client, connect = HTTPClient(url), HTTPConnection.connect

        def broken_off(connection: HTTPConnection) -> None:
            client.hang_up()
            connect(connection)

        monkeypatch.setattr(HTTPConnection, "connect", broken_off)
        with pytest.raises(ServerGoneError, match="broken off"):
            client.get("/health")
        monkeypatch.undo()
        assert client.get("/health") == {}, "a later one is asked"


def engine_for(url: str, tmp_path: Path, **keys: Any) -> Any:
    """The engine of a run on a server that is not there, or refuses."""

    class Other(VLLMRolloutConfig):
        @property
        def urls(self) -> tuple[str, ...]:
            return (url,)

    return served(tiny_policy(), tmp_path, config=Other, **keys)


def test_what_a_server_is_waited_for_is_said_and_so_is_why_it_was_in_vain(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(server_engine, "SILENT_SECONDS", 0.1)
    says = r"did not answer within 0\.5 seconds: .*ConnectionRefusedError"
    with (
        engine_for("http://127.0.0.1:9", tmp_path, start_seconds=0.5) as (run, _),
        pytest.raises(ConfigError, match=says),
    ):
        run.engine()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("waiting for the rollout server")]
    assert len(said) == 1
    assert "http://127.0.0.1:9/health: ConnectionRefusedError" in said[0]


def test_a_server_that_wants_a_key_is_not_waited_for(tmp_path):
    with (
        answering(401, "Unauthorized") as (url, headers),
        engine_for(url, tmp_path, start_seconds=10.0) as (run, _),
        pytest.raises(ConfigError, match=r"401 Unauthorized\. rollout\.api_key_env names"),
    ):
        run.engine()
    assert len(headers) == 1


@pytest.mark.parametrize("config", [VLLMRolloutConfig, ServerRolloutConfig], ids=["vllm", "sglang"])
def test_an_error_in_the_place_of_an_answer_is_said_in_the_server_s_words(tmp_path, config):
    with served(tiny_policy(), tmp_path, config=config) as (run, [server]):
        engine = run.engine()
        error = {"object": "error", "message": "the worker ran out of blocks", "code": 500}
        server.changed = lambda asked, body, found, to: error if asked in ("/v1/completions", "/generate") else found
        with pytest.raises(TrainingError, match="the worker ran out of blocks"):
            generate(engine, requests_of(2))


# ---- own servers


def test_a_server_of_our_own_may_listen_at_an_address_of_ipv6(tmp_path):
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    server = OwnServer(["true"], tmp_path, "::1", free_port("::1"), tmp_path / "log", tmp_path / "clean")
    assert server.url == f"http://[::1]:{server.port}"
    assert VLLMRolloutConfig(url=server.url).urls == (server.url,)
    with answering(200, "{}", host="::1") as (url, headers):
        HTTPClient(url).get("/health")
        assert address_for(url) == "::1"
    assert len(headers) == 1


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "a..b", "[::1"])
def test_a_host_where_nothing_can_listen_is_refused_in_words(host):
    with pytest.raises(ConfigError, match=r"^rollout\.host=.*no server can listen at that address here"):
        free_port(host)


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@contextmanager
def answering(status: int, text: str, host: str = "127.0.0.1") -> Any:
    """(address, headers of every request) of a server that always says the same."""
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(dict(self.headers))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    class Listener(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    made = Listener((host, 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{made.server_port}", seen
    finally:
        made.shutdown()
        made.server_close()
        thread.join()
