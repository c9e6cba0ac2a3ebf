"""Lets requests through to servers, and holds new ones back while the servers' weights change.

Leaves out what becomes of those that are under way then (``server_requests.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlmodule.rollout.parts.http_client import ServerGoneError

POLL_SECONDS = 0.1


@dataclass(eq=False)
class Gate:
    """Passed by many threads, closed and opened by one."""

    is_open: bool = True
    _inside: int = field(default=0, init=False)
    _change: threading.Condition = field(default_factory=threading.Condition, init=False)

    @contextmanager
    def passage(self, given_up: threading.Event) -> Iterator[None]:
        """Around one request; waits while the gate is closed.

        Raises:
            ServerGoneError: it was given up meanwhile.
        """
        with self._change:
            while not self.is_open:
                if given_up.is_set():
                    raise ServerGoneError("given up")
                self._change.wait(POLL_SECONDS)
            self._inside += 1
        try:
            yield
        finally:
            with self._change:
                self._inside -= 1
                self._change.notify_all()

    def close(self) -> None:
        """Let no further request through."""
        with self._change:
            self.is_open = False

    def open(self) -> None:
        """Let those that wait through."""
        with self._change:
            self.is_open = True
            self._change.notify_all()

    def wait_until_empty(self, seconds: float | None = None) -> bool:
        """Wait until no request is under way; whether that is so after ``seconds``."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._change:
            while self._inside and (deadline is None or time.monotonic() < deadline):
                self._change.wait(POLL_SECONDS)
            return not self._inside
