"""JSON over HTTP to one server, from many threads, over connections that stay open; the standard library alone.

A server that is gone and one that refuses are told apart: what it refuses it would refuse again. One that fails at an
answer, or breaks it off, may do better the next time, and is asked again a few times first. Leaves out what is said
(``server_api.py`` and the files of the dialects).
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rlmodule.core.api_keys import authorization, key_in, without_key

WORDS_OF_SERVER = 500  # characters of an error message
BUSY, ENDING = 429, 503
BROKEN = (
    BUSY,
    502,
    ENDING,
    504,
)  # what a proxy says whose server has ended, and a server that is ending, or has no room
FAILED = 500  # HTTP's status for a server that fails at an answer, and the least of its like
FOR_WANT_OF_A_KEY = (401, 403)
TRIES = 4  # at one request that a server fails at
RETRY_SECONDS = 0.05  # before the second of them, and twice as long before each next one
WAIT_SECONDS = 1.0  # for a busy server that does not say how long
POLL_SECONDS = 0.1
CHUNK_BYTES = 1 << 16


class ServerGoneError(Exception):
    """There is no server, or the connection to it broke before it had answered."""


class _BrokenOffError(ServerGoneError):
    """The server was there, and its answer broke off."""


class _ClosedWhileIdleError(ServerGoneError):
    """The same, on a connection that had been open before: another one may do."""


class ServerRefusedError(Exception):
    """The server answered that it does not do what it was asked; ``status`` is HTTP's."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(eq=False)
class HTTPClient:
    """Asks the server at one address.

    Args:
        url: its address, without a path.
        timeout: seconds that a request may take.
        api_key_env: environment variable with the key that it wants; empty where it wants none.
    """

    url: str
    timeout: float = 600.0
    api_key_env: str = ""
    _idle: list[http.client.HTTPConnection] = field(default_factory=list, init=False)
    _busy: set[http.client.HTTPConnection] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _calls_broken_off: int = field(default=0, init=False)  # times that requests were broken off

    def get(self, path: str, *, timeout: float | None = None) -> Any:
        """What the server says at ``path``; None where it says nothing that is JSON.

        Raises:
            ServerGoneError, ServerRefusedError: it does not.
        """
        return self._ask("GET", path, None, timeout)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        tries: int = TRIES,
    ) -> Any:
        """What the server answers to ``body``; otherwise as ``get``. What may be done but once has one of ``tries``."""
        return self._ask("POST", path, body, timeout, tries)

    def hang_up(self) -> None:
        """Break off every request under way, which a server takes for their end."""
        self._calls_broken_off += 1
        for connection in list(self._busy):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; a later request opens another."""
        self.hang_up()
        self._close_idle()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None, tries: int = TRIES
    ) -> Any:
        data, calls = None if body is None else json.dumps(body).encode(), self._calls_broken_off
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        failures = 0
        while True:
            try:
                status, wait, said = self._once(method, path, data, deadline, calls)
            except _ClosedWhileIdleError:
                failures += 1
                self._close_idle()  # as old as this one, or older
                if failures > tries or not self._may_go_on(0.0, deadline, calls):
                    raise
                continue
            except _BrokenOffError:
                failures += 1
                if failures >= tries or not self._may_go_on(_pause(failures), deadline, calls):
                    raise
                continue
            if wait is None and status >= FAILED:
                failures += 1
                wait = _pause(failures) if failures < tries else None
            if wait is None or not self._may_go_on(wait, deadline, calls):
                break
        if status in BROKEN:
            raise ServerGoneError(f"{self.url}{path}: {status} {self.words(said)}")
        if status >= 300:
            hint = ". rollout.api_key_env names the variable with its key" if status in FOR_WANT_OF_A_KEY else ""
            raise ServerRefusedError(f"{self.url}{path}: {status} {self.words(said)}{hint}", status)
        with suppress(ValueError):
            return json.loads(said)
        return None

    def _may_go_on(self, wait: float, deadline: float, calls: int) -> bool:
        """Whether there is time to ask again after ``wait`` seconds, which pass here unless requests are broken off."""
        until = time.monotonic() + wait
        if until >= deadline:
            return False
        while time.monotonic() < until and self._calls_broken_off == calls:
            time.sleep(min(wait, POLL_SECONDS))
        return self._calls_broken_off == calls

    def _once(
        self, method: str, path: str, data: bytes | None, deadline: float, calls: int
    ) -> tuple[int, float | None, bytes]:
        """(status, seconds until it wants to be asked again or None, body) of one answer."""
        connection = self._connection(max(deadline - time.monotonic(), POLL_SECONDS))
        was_open = connection.sock is not None
        try:
            connection.request(method, path, data, self._headers())
            if self._calls_broken_off != calls:  # before there was a socket to shut
                raise ConnectionAbortedError("broken off")
            answer = connection.getresponse()
            said = answer.status, _wait_of(answer), _read(answer, deadline)
            with self._lock:
                self._idle.append(connection)
            return said
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            # Servers close connections that were idle for some seconds, which is seen at the next request only.
            is_idle = was_open and isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
            is_cut = isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected)
            kind = _ClosedWhileIdleError if is_idle else _BrokenOffError if is_cut else ServerGoneError
            raise kind(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from None
        finally:
            self._busy.discard(connection)

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that nobody uses, the one used last, or a new one."""
        with self._lock:
            found = self._idle.pop() if self._idle else None
        if found is None:
            parts = urlsplit(self.url)
            assert parts.hostname is not None, "addresses are checked before they are used"
            made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            found = made(parts.hostname, parts.port)
        found.timeout = timeout
        if found.sock is not None:
            found.sock.settimeout(found.timeout)
        self._busy.add(found)
        return found

    def words(self, said: bytes) -> str:
        """The begin of what a server said, for a message; a key that it repeats is left out."""
        text = without_key(said[: 4 * WORDS_OF_SERVER].decode(errors="replace"), self._key)
        return " ".join(text.split())[:WORDS_OF_SERVER]

    @property
    def _key(self) -> str:
        return key_in(self.api_key_env, section="rollout.")

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | authorization(self._key)


def _read(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body; one that comes byte by byte may not take longer than one that comes late."""
    parts = []
    while part := answer.read1(CHUNK_BYTES):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError("the answer was not whole in time")
    if answer.length:
        raise http.client.IncompleteRead(b"".join(parts), answer.length)
    answer.read()  # nothing is left, which frees the connection for the next request
    return b"".join(parts)


def _pause(failures: int) -> float:
    """Seconds before another try."""
    return RETRY_SECONDS * 2.0 ** (failures - 1)


def _wait_of(answer: http.client.HTTPResponse) -> float | None:
    """Seconds after which a busy server wants to be asked again; None where it did not say that it is busy."""
    said = answer.headers.get("Retry-After")
    if answer.status != BUSY and not (answer.status == ENDING and said is not None):
        return None
    return float(said) if said is not None and said.strip().isdecimal() else WAIT_SECONDS
