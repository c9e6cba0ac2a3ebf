"""Call a Python function in child processes that can be killed: it may hang, crash or swallow exceptions, we go on.

A child is a fresh interpreter with nothing of the trainer in it (no torch, no CUDA, no rank), so it starts in about a
tenth of a second, from any thread, at any time. Arguments go out as pickles; results come back as JSON, so nothing that
a child says is unpickled. Leaves out security: the code runs with the user's own rights. Linux and macOS only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

START_SECONDS = 120.0  # to import the function's module, which may bring a large library along
ORPHAN_CORES = 8  # a call may keep this many cores busy for its whole time; the kernel ends what uses more

_PROGRAM = """
import sys
handle, path, timeout, sys.path[:] = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]
from rlmodule.rewards.parts.sandbox import serve
serve(handle, path, timeout)
"""


class LoadError(Exception):
    """The function cannot be imported; the text is the traceback of the child."""


@dataclass(frozen=True)
class Outcome:
    """What became of one call.

    Args:
        result: what the function returned, as JSON knows it; numbers of other libraries are floats.
        fault: traceback or reason when there is no result, else None.
        timed_out: it was killed for taking too long.
    """

    result: Any = None
    fault: str | None = None
    timed_out: bool = False


class Pool:
    """Child processes that call one function.

    A child that overruns its time or dies is replaced, together with everything it started. The pool closes itself when
    nobody uses it any more and when the interpreter ends; a child ends by itself when its parent is gone. In a forked
    process the pool starts children of its own. Calls from several threads take turns.

    Args:
        path: ``package.module:function`` or ``path/to/file.py:function``.
        size: child processes.
        timeout: seconds one call may take.

    Raises:
        LoadError: the function cannot be imported.
    """

    def __init__(self, path: str, size: int, timeout: float) -> None:
        self.path, self.size, self.timeout = path, size, timeout
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        self._adopt()
        with self._closed_on_error():
            self._fill()
            while not any(child.is_idle for child in self._children):
                self._listen({})

    def map(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Call the function once per entry of ``calls``, its items as keyword arguments; outcomes in the same order.

        Raises:
            LoadError: a replaced child cannot import the function any more.
        """
        with self._lock:
            if self._owner != os.getpid():
                self._adopt()
            with self._closed_on_error():
                return self._map(calls)

    def close(self) -> None:
        """Kill the children. A pool that is used again starts new ones."""
        _kill_all(self._children, self._owner)

    def _adopt(self) -> None:
        """Begin without children, in the process that made the pool or in a fork of it."""
        for child in self._children:
            child.forget()
        self._owner = os.getpid()
        self._children = []
        weakref.finalize(self, _kill_all, self._children, self._owner)

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()  # or an answer still on its way would be taken for one to the next call
            raise

    def _map(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(calls)))
        while len(outcomes) < len(calls):
            self._fill()
            idle = [child for child in self._children if child.is_idle]
            for child in idle[: len(waiting)]:
                index = waiting.popleft()
                child.begin(index, calls[index], self.timeout)
            self._listen(outcomes)
        return [outcomes[index] for index in range(len(calls))]

    def _fill(self) -> None:
        """Have all children, each new, idle or busy; none that died while idle."""
        for child in [child for child in self._children if child.is_idle and child.connection.poll()]:
            self._discard(child)  # an idle child has nothing to say, so what came is the end of its stream
        while len(self._children) < self.size:
            self._children.append(_Child(self.path, self.timeout))

    def _listen(self, outcomes: dict[int, Outcome]) -> None:
        """Wait until a child that owes an answer gives it or runs out of time."""
        owing = [child for child in self._children if not child.is_idle]
        patience = min(child.deadline for child in owing) - time.monotonic()
        heard = wait([child.connection for child in owing], max(patience, 0.0))
        for child in owing:
            if child.connection in heard:
                self._hear(child, outcomes)
            elif time.monotonic() >= child.deadline:
                self._discard(child)
                if child.task is None:
                    raise LoadError(f"importing it takes longer than {START_SECONDS:.0f} seconds")
                outcomes[child.task] = Outcome(fault=f"no result within {self.timeout:g} seconds", timed_out=True)

    def _hear(self, child: _Child, outcomes: dict[int, Outcome]) -> None:
        try:
            reply = json.loads(child.connection.recv_bytes())
        except (EOFError, OSError):
            reply = {"fault": f"the process that ran it {self._discard(child)}"}
        if child.task is not None:
            outcomes[child.task] = Outcome(**reply)
        elif "fault" in reply:
            raise LoadError(reply["fault"])
        child.rest()

    def _discard(self, child: _Child) -> str:
        self._children.remove(child)
        return child.kill()


class _Child:
    """One child process: importing at first, then idle, or busy with a task until a deadline."""

    def __init__(self, path: str, timeout: float) -> None:
        here, there = socket.socketpair()
        with there:
            arguments = [str(there.fileno()), path, str(timeout), *map(os.path.abspath, sys.path)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,  # out of reach of Ctrl-C; and what it starts can be killed with it
            )
        self.connection = Connection(here.detach())
        self.task: int | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self._is_importing = True

    @property
    def is_idle(self) -> bool:
        return self.task is None and not self._is_importing

    def begin(self, task: int, call: Mapping[str, Any], timeout: float) -> None:
        message = pickle.dumps(dict(call))
        self.task, self.deadline = task, time.monotonic() + timeout
        with contextlib.suppress(OSError):  # it died this instant; whoever listens to it finds out
            self.connection.send_bytes(message)

    def rest(self) -> None:
        self.task, self._is_importing = None, False

    def kill(self) -> str:
        """End the child and everything it started; says how it ended."""
        # Before wait(), which frees the number for another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.connection.close()
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def forget(self) -> None:
        """Let go of a child of the process that this one was forked from."""
        self.connection.close()
        self._process.returncode = 0  # not ours to wait for


def _kill_all(children: list[_Child], owner: int) -> None:
    while children and owner == os.getpid():
        children.pop().kill()


def serve(handle: int, path: str, timeout: float) -> None:
    """Main loop of a child: import the function, then answer calls until the parent is gone."""
    sys.argv[1:] = []
    threading.Thread(target=_end_with_parent, args=(handle,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    connection = Connection(handle)
    try:
        function = load_function(path)
    except BaseException as error:
        connection.send_bytes(_fault(error))
        return
    connection.send_bytes(json.dumps({"result": "ready"}).encode())
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            message = connection.recv_bytes()
            _limit_processor_time(timeout)
            connection.send_bytes(_answer(function, message))


def load_function(path: str) -> Callable[..., Any]:
    """Import ``package.module:function`` or ``path/to/file.py:function``; the file's folder joins the search path."""
    location, _, name = path.rpartition(":")
    module = _run_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    function: Callable[..., Any] = attrgetter(name)(module)
    return function


def _run_file(file: Path) -> ModuleType:
    sys.path.append(str(file.parent))
    name = f"user_{file.stem}"  # json.py must not take the place of json
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec, f"{file} is not a Python file"
    assert spec.loader, f"{file} has no loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _answer(function: Callable[..., Any], message: bytes) -> bytes:
    try:
        result = function(**pickle.loads(message))
        return json.dumps({"result": result}, default=float).encode()
    except BaseException as error:  # SystemExit too: the code of a reward is not ours
        return _fault(error)


def _fault(error: BaseException) -> bytes:
    assert error.__traceback__ is not None, "it was raised"
    lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)  # without this file's frame
    return json.dumps({"fault": "".join(lines)}).encode()


def _end_with_parent(handle: int) -> None:
    hang_up = select.poll()
    hang_up.register(handle, 0)  # the end of the stream is reported unasked
    hang_up.poll()
    os.killpg(0, signal.SIGKILL)


def _limit_processor_time(timeout: float) -> None:
    """Have the kernel end a busy loop in C that holds the interpreter lock, when no parent is left to do it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time() + (timeout + 1) * ORPHAN_CORES)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
