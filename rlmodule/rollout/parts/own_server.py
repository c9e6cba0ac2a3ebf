"""A server that the run starts itself, starts again when it dies, and never leaves behind.

The child is a keeper (``server_keeper.py``), which runs the server and ends it with this process, however that ends.
Leaves out what the server is asked (``server_engine.py``).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlmodule.core.errors import ConfigError

KEEPER = Path(__file__).with_name("server_keeper.py")
PATIENCE_SECONDS = 40.0  # for the keeper, which gives the server half of them
LAST_LINES = 12  # of a log, in a message
WATCH_SECONDS = 0.2  # between two looks at a process


def free_port(host: str) -> int:
    """A port that nothing listens on at this moment.

    Raises:
        ConfigError: nothing can listen there.
    """
    try:
        with socket.socket(family_of(host)) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
        raise ConfigError(
            key="rollout.host",
            got=host,
            because=f"no server can listen at that address here ({error})",
            fix="Use an address of this machine, such as 127.0.0.1 or ::1",
        ) from None


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address of that kind, written without brackets."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@dataclass(eq=False)
class OwnServer:
    """One server of the run, in a process of its own.

    Args:
        command: starts it, with FOLDER, HOST and PORT where those belong.
        folder: of the model.
        host, port: where it listens.
        log: file that takes all it writes.
        clean: folder to remove when the trainer is gone without having closed it.
        environment: variables beside this process's own; an empty value takes one away.
    """

    command: Sequence[str]
    folder: Path
    host: str
    port: int
    log: Path
    clean: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _keeper: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_running(self) -> bool:
        """Whether its process lives, be it ready or not."""
        return self._keeper is not None and self._keeper.poll() is None

    def start(self) -> None:
        """Start it, or start it again; it needs a while before it answers."""
        self.close()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        places = {"FOLDER": str(self.folder), "HOST": self.host, "PORT": str(self.port)}
        command = [_filled(word, places) for word in self.command]
        wanted = {**os.environ, **self.environment}
        with self.log.open("ab") as log:
            log.write(f"\n==== {' '.join(command)}\n".encode())
            log.flush()
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", str(KEEPER), str(self.clean), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={name: value for name, value in wanted.items() if value},
                start_new_session=True,  # Ctrl-C is for the trainer, which then closes it
            )

    def close(self) -> None:
        """End it, with every process it has started, and remove ``clean``."""
        self._end(b"")

    def end(self) -> None:
        """End it likewise and leave ``clean``, so that it can be started again."""
        self._end(b"e")

    def _end(self, word: bytes) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        assert keeper.stdin is not None, "it was started with a pipe"
        with suppress(BrokenPipeError):  # the keeper has ended
            keeper.stdin.write(word)
            keeper.stdin.close()
        try:
            keeper.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(keeper.pid, signal.SIGKILL)
            keeper.wait()

    def last_words(self) -> str:
        """The end of its log, for a message."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LAST_LINES:])


@dataclass(eq=False)
class OwnServers:
    """The servers of a run that it starts itself, on the rank that looks after them; empty on the others.

    Args:
        servers: each with its port.
        restarts: times that one of them is started again when it has ended.
    """

    servers: Sequence[OwnServer] = ()
    restarts: int = 3
    _closing: threading.Event = field(default_factory=threading.Event, init=False)
    _may_start: threading.Lock = field(default_factory=threading.Lock, init=False)
    _watch: threading.Thread | None = field(default=None, init=False)

    def at(self, url: str) -> OwnServer | None:
        """The server with this address, if it is one of them."""
        return next((server for server in self.servers if server.url == url), None)

    def start(self) -> None:
        """Start all of them, the first time; later ``watch`` does."""
        for server in self.servers if self._watch is None else ():
            server.start()

    def none_starts(self) -> AbstractContextManager[object]:
        """Context in which no server is started again: what it would load is being written."""
        return self._may_start

    def watch(self) -> None:
        """From now on start again what has ended; calling it again does nothing."""
        if self.servers and self._watch is None:
            self._watch = threading.Thread(target=self._look_after, name="rollout servers", daemon=True)
            self._watch.start()

    def has_ended(self, url: str) -> bool:
        """Whether a server is one of them, does not run, and will not be started again."""
        server = self.at(url)
        is_watched = self._watch is not None and self.restarts > 0
        return server is not None and not server.is_running and not is_watched

    def end(self, url: str) -> None:
        """End the server with this address, if it is one of them; where it is watched it starts again."""
        if (server := self.at(url)) is not None:
            with self._may_start:
                server.end()

    def close(self) -> None:
        """End all of them."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join()
        for server in self.servers:
            server.close()

    def _look_after(self) -> None:
        while not self._closing.wait(WATCH_SECONDS):
            with self._may_start:
                for server in self.servers:
                    if not server.is_running and self.restarts > 0:
                        self.restarts -= 1
                        server.start()


def _filled(word: str, places: Mapping[str, str]) -> str:
    """A word of a command with the names of places in it replaced."""
    return re.sub(rf"\b({'|'.join(places)})\b", lambda found: places[found[1]], word)
