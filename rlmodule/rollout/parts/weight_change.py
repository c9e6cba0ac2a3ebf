"""What becomes of requests under way while the weights of servers change: they end first, are cut off, or stand still.

Every rank has requests of its own under way, and all of them change weights as one. Leaves out how weights reach a
server (``server_engine.py``), and how a response that was cut off goes on (``server_requests.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rlmodule.core.episodes import ABORT, KEEP, WAIT
from rlmodule.rollout.parts.gate import Gate
from rlmodule.rollout.parts.http_client import ServerGoneError, ServerRefusedError
from rlmodule.rollout.parts.server_api import ServerApi

T = TypeVar("T")

ROUND_SECONDS = 0.2  # between two orders to cut off what is under way


class Ranks(Protocol):
    """How ranks act as one; every rank calls both."""

    def on_first(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on the first rank."""

    def gather(self, item: T) -> Sequence[T]:
        """The item of each rank."""


@dataclass(eq=False)
class WeightChange:
    """Keeps requests and new weights apart.

    Args:
        pause: one of PAUSES.
        ranks: act as one.
        servers: gives those that are in use.
        gate: that every request passes.
        is_on: whether requests can be under way at all; nothing is done before that.
        lock: held while weights change, also by who gives them to a server that was lost.
    """

    pause: str
    ranks: Ranks
    servers: Callable[[], Sequence[ServerApi]]
    gate: Gate = field(default_factory=Gate)
    is_on: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def around(self, check: Callable[[], None]) -> Iterator[None]:
        """Around a change of weights; no request goes out from its begin until ``resume``, so none before the proof.

        Args:
            check: called on the first rank before anything is touched.
        """
        if not self.is_on:
            yield
            return
        self.gate.close()
        paused: list[ServerApi] = []
        try:
            self.ranks.on_first(check)
            BEFOREHAND[self.pause](self, paused)
            with self.lock:
                self.ranks.gather(None)  # on every rank nothing goes out any more, and no server is brought back
                if self.pause == KEEP:
                    self._pause_servers(paused)
                yield
        except BaseException:
            self.gate.open()
            raise
        finally:
            for api in paused:
                with suppress(ServerGoneError, ServerRefusedError):
                    api.resume()

    def resume(self) -> None:
        """Let requests through again."""
        self.gate.open()

    def let_end(self) -> None:
        """Wait for the responses that this rank has asked for."""
        self.gate.wait_until_empty()

    def cut_off(self, paused: list[ServerApi]) -> None:
        """Have what is under way returned as it is, until no rank has anything left, nor on its way to a server."""
        is_empty = False
        while not is_empty:
            self._pause_servers(paused)
            is_empty = all(self.ranks.gather(self.gate.wait_until_empty(ROUND_SECONDS)))

    def _pause_servers(self, paused: list[ServerApi]) -> None:
        def pause() -> None:
            for api in self.servers():
                if api not in paused:  # one that is lost meanwhile is told to go on as well
                    paused.append(api)
                with suppress(ServerGoneError):  # found out by who asks it
                    api.pause(self.pause)

        self.ranks.on_first(pause)


# What is done with requests under way before servers are given weights; those that are kept stand still meanwhile.
BEFOREHAND: Mapping[str, Callable[[WeightChange, list[ServerApi]], None]] = {
    WAIT: lambda change, paused: change.let_end(),
    ABORT: WeightChange.cut_off,
    KEEP: lambda change, paused: None,
}
