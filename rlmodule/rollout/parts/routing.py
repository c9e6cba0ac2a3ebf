"""Requests to several servers: each goes to the one with the fewest in flight, and to another when that one dies.

A request that was lost is asked again as it was, with its own seed and sample id. Leaves out how a dead server is
brought back (``server_engine.py``) and what is asked (``server_api.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rlmodule.core.errors import EnginesGoneError, TrainingError
from rlmodule.rollout.parts.http_client import FAILED, TRIES, ServerGoneError, ServerRefusedError
from rlmodule.rollout.parts.server_api import ServerApi

T = TypeVar("T")

ATTEMPTS = 3  # at one request that a server fails at, after its own tries, while it goes on answering others
WAIT_SECONDS = 0.05


@dataclass(eq=False)
class Place:
    """One server and what is in flight there.

    Args:
        api: asks it.
        in_flight: requests that it has not answered.
        why: how it was lost; None while it is in use.
        is_coming_back: whether somebody tries to bring it back.
        life: times that it came back, so that a late report of an earlier loss is told from a new one.
    """

    api: ServerApi
    in_flight: int = 0
    why: str | None = None
    is_coming_back: bool = False
    life: int = 0


@dataclass(eq=False)
class Router:
    """Sends requests to the least loaded of several servers; called by many threads.

    Args:
        places: the servers.
        revive: called once, by one thread, for each server that was lost: brings it back with the present weights and
            returns whether it did; gives up when the event is set. While it runs the others go on; where there are no
            others, requests wait for it.
        say: is given a line for people.
        lost, asked_again: counts of servers lost and of requests that were asked again.
    """

    places: Sequence[Place]
    revive: Callable[[ServerApi, threading.Event], bool]
    say: Callable[[str], object] = lambda line: None
    lost: int = 0
    asked_again: int = 0
    _change: threading.Condition = field(default_factory=threading.Condition, init=False)

    @property
    def in_use(self) -> list[ServerApi]:
        """The servers that requests go to now."""
        return [place.api for place in self.places if place.why is None]

    def ask(self, question: Callable[[ServerApi], T], given_up: threading.Event) -> T:
        """What the least loaded server answers; asked of another when it is lost on the way.

        Args:
            question: asks one server.
            given_up: set before ``hang_up``, whose broken connections are no loss of a server.

        Raises:
            ServerGoneError: it was given up.
            EnginesGoneError: there is none left.
            TrainingError: a server refuses, and would refuse again.
        """
        failures = losses = 0
        while True:
            place, life = self._take(given_up)
            try:
                return question(place.api)
            except ServerGoneError as error:
                if given_up.is_set():
                    raise
                self._lose(place, life, str(error), given_up)
                losses += 1
                if losses == ATTEMPTS * len(self.places):  # the servers come back, and this request never does
                    raise TrainingError(
                        f"the rollout servers lost a request {losses} times, at last: {error}"
                    ) from None
            except ServerRefusedError as error:
                if given_up.is_set():
                    raise
                if error.status < FAILED:
                    raise TrainingError(f"the rollout server refused a request: {error}") from None
                if not place.api.is_ready():
                    self._lose(place, life, str(error), given_up)
                    continue
                failures += 1
                if failures == ATTEMPTS:
                    raise TrainingError(
                        f"the rollout servers failed at a request {ATTEMPTS * TRIES} times, not at others; at last: "
                        f"{error}. Look into their logs, and go on with resume=auto"
                    ) from None
                time.sleep(WAIT_SECONDS)
            finally:
                with self._change:
                    place.in_flight -= 1

    def hang_up(self) -> None:
        """Give up every request under way."""
        for api in self.in_use:
            api.hang_up()

    def leave_out(self, comes_back: Callable[[ServerApi], bool]) -> None:
        """Use those servers that come back, and the others no more until the next update.

        Raises:
            EnginesGoneError: none does.
        """
        for place in self.places:
            if place.why is None and not comes_back(place.api):
                place.why = "it was lost, and did not come back"
                self.lost += 1
        if not self.in_use:
            raise none_left({place.api.url: str(place.why) for place in self.places})

    def _take(self, given_up: threading.Event) -> tuple[Place, int]:
        """(the server with the fewest requests in flight, its life); waits where all are lost and some come back."""
        with self._change:
            while True:
                usable = [place for place in self.places if place.why is None]
                if usable:
                    chosen = min(usable, key=lambda place: place.in_flight)
                    chosen.in_flight += 1
                    return chosen, chosen.life
                if not any(place.is_coming_back for place in self.places):
                    raise none_left({place.api.url: str(place.why) for place in self.places})
                if given_up.is_set():
                    raise ServerGoneError("given up")
                self._change.wait(WAIT_SECONDS)

    def _lose(self, place: Place, life: int, why: str, given_up: threading.Event) -> None:
        """Take a server out of use; the first thread to notice tries to bring it back."""
        with self._change:
            self.asked_again += 1
            if place.why is not None or place.life != life:
                return
            place.why, place.is_coming_back = why, True
            self.lost += 1
        self.say(f"rollout server lost: {why}")
        came_back = False
        try:
            came_back = self.revive(place.api, given_up)
        finally:
            with self._change:
                place.is_coming_back = False
                if came_back:
                    place.why, place.life = None, life + 1
                self._change.notify_all()
        self.say(f"rollout server {place.api.url} {'is back with the present weights' if came_back else 'is dropped'}")


def none_left(lost: Mapping[str, str]) -> EnginesGoneError:
    """The error that says how each server was lost: url -> why."""
    why = "; ".join(f"{url}: {reason}" for url, reason in lost.items())
    return EnginesGoneError(
        f"no rollout server is left ({why}). Look into the servers' logs, start them again, and go on with resume=auto"
    )
