"""Environments behind an OpenEnv server (github.com/meta-pytorch/OpenEnv): ``environment=openenv environment.url=...``.

An episode is a session on the server's ``/ws``: ``reset`` with a seed of its own gives what the policy reads first,
``step`` takes each response as an action, and gives an observation, a reward and whether that was the end. Leaves out
starting servers, and tools by the Model Context Protocol.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlmodule.core.config import at_least, more_than
from rlmodule.core.episodes import Completion, Done, Observation
from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.environments import ENVIRONMENTS

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
TEST_SEEDS = 1 << 30  # held-out episodes have seeds from here on


@ENVIRONMENTS.register
@dataclass(frozen=True)
class OpenEnv:
    """Rows are seeds. The server holds one session for each episode under way; rewards of the steps are added up."""

    url: str  # of the server, such as http://localhost:8000
    action_key: str = "message"  # field of the action that a response becomes
    observation_key: str = ""  # field of the observation that is shown; empty: its only text, else all of it as JSON
    reset: dict[str, Any] = field(default_factory=dict)  # further arguments of reset, such as a name of a task
    train_size: int = 8192  # rows, each with a seed
    test_size: int = 256  # held-out rows, with seeds that no training row has
    seed: int = 0  # first seed of the training rows
    request_seconds: float = 30.0  # that the server may take for one answer

    has_many_answers: ClassVar[bool] = True
    gives_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("train_size", self.train_size, 1)
        at_least("test_size", self.test_size, 1)
        at_least("seed", self.seed, 0)
        more_than("request_seconds", self.request_seconds, 0)
        scheme, found, rest = self.url.partition("://")
        if not found or not rest or scheme not in SCHEMES:
            raise ConfigError(
                key="url", got=self.url, because="it is no address of a server", fix="Use http://HOST:PORT"
            )
        if importlib.util.find_spec("websockets") is None:
            raise DependencyError(package="websockets", needed_by="environment=openenv", extra="openenv")

    @property
    def observation_role(self) -> str:
        """What the server says is the user's."""
        return "user"

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Rows of ``train`` or ``test``, each about the episode of one seed."""
        assert split in ("train", "test"), f"no split is called {split}"
        first, count = (self.seed, self.train_size) if split == "train" else (TEST_SEEDS, self.test_size)
        return [
            {"prompt": f"episode {first + number}", "source": "openenv", "seed": first + number}
            for number in range(count)
        ]

    def start(self, row: Prompt) -> ServerEpisode:
        """A session about the seed of ``row``; opened with its prompt."""
        return ServerEpisode(self, row)

    @property
    def socket_url(self) -> str:
        """Where sessions are opened."""
        scheme, _, rest = self.url.partition("://")
        return f"{SCHEMES[scheme]}://{rest.rstrip('/')}/ws"

    def shown(self, observation: Any) -> str:
        """An observation as the policy reads it."""
        if isinstance(observation, Mapping):
            texts = [value for value in observation.values() if isinstance(value, str)]
            if self.observation_key:
                observation = observation[self.observation_key]
            elif len(texts) == 1:
                observation = texts[0]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)


@dataclass(eq=False)
class ServerEpisode:
    """One session, closed with the episode."""

    environment: OpenEnv
    row: Prompt
    _open: ExitStack = field(default_factory=ExitStack, init=False)
    _socket: ClientConnection | None = field(default=None, init=False)

    @property
    def prompt(self) -> Observation:
        """What the server shows first."""
        from websockets.sync.client import connect

        seconds = self.environment.request_seconds
        connection = connect(self.environment.socket_url, open_timeout=seconds, max_size=None)
        self._socket = self._open.enter_context(connection)
        seed = int(self.row.meta["seed"])
        result = self._ask("reset", {"seed": seed, "episode_id": str(seed), **self.environment.reset})
        return Observation(messages=[self._message(result)])

    def reply(self, completion: Completion) -> Observation | Done:
        """What the server makes of a response, with the reward of that step."""
        result = self._ask("step", {self.environment.action_key: completion.text})
        reward = result.get("reward")
        value = None if reward is None else float(reward)
        if not result.get("done"):
            return Observation(messages=[self._message(result)], reward=value)
        self._close()
        return Done(RewardResult(value or 0.0))

    def cut(self) -> Done:
        """The session is given up; what its steps were worth counts."""
        self._close()
        return Done(RewardResult(0.0))

    def _message(self, result: Mapping[str, Any]) -> dict[str, str]:
        return {"role": "user", "content": self.environment.shown(result.get("observation", {}))}

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self._answer(kind, data)
        except BaseException:  # nobody will ask again, and a server has room for so many sessions
            self._close()
            raise

    def _answer(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None, "a session is opened with the prompt"
        self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        answer = json.loads(self._socket.recv(self.environment.request_seconds))
        content: Mapping[str, Any] = answer.get("data", {})
        if answer.get("type") == "error":
            raise RuntimeError(f"the server answers {kind} with an error: {content.get('message')}")
        return content

    def _close(self) -> None:
        """Leave the session; a server that has gone needs no goodbye."""
        with suppress(Exception):
            if self._socket is not None:
                self._socket.send(json.dumps({"type": "close"}))
        with suppress(Exception):
            self._open.close()
