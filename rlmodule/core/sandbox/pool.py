"""Call a Python function in child processes that can be killed: it may hang, crash, flood its output or fork.

A child is a fresh interpreter with nothing of the trainer in it (no torch, no CUDA, no rank), so it starts in about a
tenth of a second, from any thread, at any time. Arguments go out as pickles; results come back as JSON of bounded size,
so nothing that a child sends is unpickled. What children print comes through a pipe, of which a bounded part is shown.
Leaves out security: the code runs with the user's own rights. Linux and macOS only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

START_SECONDS = 120.0  # to import the function's module, which may bring a large library along
PATIENT_SECONDS = 10.0  # of waiting for the import before a line says so
ORPHAN_CORES = 8  # a call may keep this many cores busy for its whole time; the kernel ends what uses more
RESULT_BYTES = 1 << 20  # of one reply: a score and its components
FAULT_CHARACTERS = 4000  # of one traceback, the last ones
OUTPUT_BYTES = 64 << 10  # of what the children of a pool print that are shown, over its whole life

# By its path, for the packages around this one import torch.
_PROGRAM = """
import importlib, importlib.util, sys
handle, path, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
memory, folder, sys.path[:] = int(sys.argv[4]), sys.argv[5], sys.argv[6:]
places = {"submodule_search_locations": [folder]}
spec = importlib.util.spec_from_file_location("rlmodule_sandbox", folder + "/__init__.py", **places)
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
importlib.import_module("rlmodule_sandbox.pool").serve(handle, path, timeout, memory)
"""


class LoadError(Exception):
    """The function cannot be imported; the text is the traceback of the child."""


class LoadTimeoutError(LoadError):
    """Importing the function takes too long."""


@dataclass(frozen=True)
class Outcome:
    """The end of one call.

    Args:
        result: what the function returned, as JSON knows it; numbers and arrays of other libraries are plain ones.
        fault: traceback or reason when there is no result, else None.
        timed_out: it was killed for taking too long.
    """

    result: Any = None
    fault: str | None = None
    timed_out: bool = False


def child_file(module: str) -> Path:
    """The file of a module that children run by its path, for the packages around it import torch."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no module {module}"
    return Path(spec.origin)


class Pool:
    """Child processes that call one function.

    A child that overruns its time or dies is replaced, together with everything it started. The pool closes itself when
    it is garbage-collected and when the interpreter ends; a child ends by itself when its parent is gone. In a forked
    process the pool starts children of its own. Calls from several threads take turns.

    Args:
        path: ``package.module:function`` or ``path/to/file.py:function``. A coroutine function is awaited.
        size: child processes.
        timeout: seconds one call may take.
        start_timeout: seconds that importing the function may take.
        memory: bytes of address space that a child may take beyond what it has once the function is imported; None for
            no limit.

    Raises:
        LoadError: the function cannot be imported.
    """

    def __init__(
        self,
        path: str,
        size: int,
        timeout: float,
        start_timeout: float = START_SECONDS,
        *,
        memory: int | None = None,
    ) -> None:
        self.path, self.size, self.timeout, self.start_timeout = path, size, timeout, start_timeout
        self.memory = memory
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        self._output_left = OUTPUT_BYTES
        self._adopt()
        with self._closed_on_error():
            self._fill()
            report_at = time.monotonic() + PATIENT_SECONDS
            while not any(child.is_idle for child in self._children):
                self._listen({}, until=report_at)
                if time.monotonic() >= report_at:
                    report_at = math.inf
                    print(f"importing {path}; this is given up after {start_timeout:g} seconds", flush=True)

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
            self._discard(child)  # an idle child sends nothing, so this is the end of its stream
        while len(self._children) < self.size:
            self._children.append(_Child(self.path, self.timeout, self.start_timeout, self.memory))

    def _listen(self, outcomes: dict[int, Outcome], until: float = math.inf) -> None:
        """Wait until a child that owes a reply gives it, prints something or runs out of time, or until ``until``."""
        owing = [child for child in self._children if not child.is_idle]
        patience = min(until, *(child.deadline for child in owing)) - time.monotonic()
        printing = {child.output: child for child in owing if child.output is not None}
        heard = wait([*(child.connection for child in owing), *printing], max(patience, 0.0))
        for output, child in printing.items():
            if output in heard:
                self._show(child)
        for child in owing:
            if child.connection in heard:
                self._hear(child, outcomes)
            elif time.monotonic() >= child.deadline:
                self._discard(child)
                if child.task is None:
                    raise LoadTimeoutError(f"importing it takes longer than {self.start_timeout:g} seconds")
                outcomes[child.task] = Outcome(fault=f"no result within {self.timeout:g} seconds", timed_out=True)

    def _hear(self, child: _Child, outcomes: dict[int, Outcome]) -> None:
        try:
            reply = json.loads(child.connection.recv_bytes(RESULT_BYTES))
        except (EOFError, OSError):
            reply = {"call": child.call, "fault": f"the process that ran it {self._discard(child)}"}
        except (ValueError, RecursionError) as error:
            reply = {"call": child.call, "fault": f"what it returned cannot be read: {type(error).__name__}"}
        if reply.pop("call") != child.call:
            return  # of an earlier call, from something that it left running
        self._show(child)
        if child.task is not None:
            outcomes[child.task] = Outcome(**reply)
        elif "fault" in reply:
            raise LoadError(reply["fault"])
        child.rest()

    def _show(self, child: _Child) -> None:
        """Pass on what the child has printed, as long as there is room, and throw the rest away."""
        printed = child.read_output()
        shown = printed[: self._output_left]
        if not shown:
            return
        self._output_left -= len(shown)
        sys.stderr.write(shown.decode("utf-8", errors="replace"))
        if not self._output_left:
            sys.stderr.write(f"\n[{self.path} prints more than {OUTPUT_BYTES >> 10} KiB; the rest is not shown]\n")
        sys.stderr.flush()

    def _discard(self, child: _Child) -> str:
        self._show(child)
        self._children.remove(child)
        return child.kill()


class _Child:
    """One child process: importing at first, then idle, or busy with a task until a deadline.

    Args:
        path: of the function.
        timeout: seconds one call may take.
        start_timeout: seconds that importing the function may take.
        memory: bytes of address space beyond that; None for no limit.
    """

    def __init__(self, path: str, timeout: float, start_timeout: float, memory: int | None) -> None:
        here, there = socket.socketpair()
        self.output: int | None
        self.output, printed = os.pipe()
        os.set_blocking(self.output, False)
        with there:
            arguments = [
                str(there.fileno()),
                path,
                str(timeout),
                str(memory or 0),
                os.path.dirname(os.path.abspath(__file__)),
            ]
            arguments += map(os.path.abspath, sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=[there.fileno()],
                start_new_session=True,  # out of reach of Ctrl-C; and what it starts can be killed with it
            )
        os.close(printed)
        self.connection = Connection(here.detach())
        self.task: int | None = None
        self.call = 0  # number of the call that a reply is owed to; 0 is the import
        self.deadline = time.monotonic() + start_timeout
        self._is_importing = True

    @property
    def is_idle(self) -> bool:
        return self.task is None and not self._is_importing

    def begin(self, task: int, call: Mapping[str, Any], timeout: float) -> None:
        self.call += 1
        message = pickle.dumps((self.call, dict(call)))
        self.task, self.deadline = task, time.monotonic() + timeout
        with contextlib.suppress(OSError):  # it died this instant; reading its reply finds out
            self.connection.send_bytes(message)

    def rest(self) -> None:
        self.task, self._is_importing = None, False

    def read_output(self) -> bytes:
        """What it has printed since, up to one pipe's worth; nothing once its output is closed."""
        try:
            printed = b"" if self.output is None else os.read(self.output, 1 << 16)
        except BlockingIOError:
            return b""
        if not printed:
            self._close_output()
        return printed

    def kill(self) -> str:
        """End the child and everything it started; returns how it ended, in words."""
        # Before wait(), which frees the number for another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.connection.close()
        self._close_output()
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def forget(self) -> None:
        """Let go of a child of the process that this one was forked from."""
        self.connection.close()
        self._close_output()
        self._process.returncode = 0  # not ours to wait for

    def _close_output(self) -> None:
        if self.output is not None:
            os.close(self.output)
        self.output = None


def _kill_all(children: list[_Child], owner: int) -> None:
    while children and owner == os.getpid():
        children.pop().kill()


def serve(handle: int, path: str, timeout: float, memory: int) -> None:
    """Main loop of a child: import the function, then answer calls until the parent is gone."""
    sys.argv[1:] = []
    threading.Thread(target=_end_with_parent, args=(handle,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    connection, process = Connection(handle), os.getpid()
    try:
        function = load_function(path)
    except BaseException as error:
        connection.send_bytes(_reply(0, fault=_fault(error)))
        return
    if memory:
        _limit_memory(memory)
    connection.send_bytes(_reply(0, result="ready"))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            message = connection.recv_bytes()
            _limit_processor_time(timeout)
            reply = _answer(function, message)
            if os.getpid() != process:
                os._exit(0)  # the function has forked, and returns twice
            _flush_output()
            connection.send_bytes(reply)


def load_function(path: str) -> Callable[..., Any]:
    """Import ``package.module:function`` or ``path/to/file.py:function``; the file's folder joins the search path."""
    location, _, name = path.rpartition(":")
    module = _run_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    function: Callable[..., Any] = attrgetter(name)(module)
    if not callable(function):
        raise TypeError(f"{name} is {function!r:.80}, which cannot be called")
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
    call, arguments = pickle.loads(message)
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
    except BaseException as error:  # SystemExit too: the code of a reward is not ours
        return _reply(call, fault=_fault(error))
    try:
        reply = _reply(call, result=result)
    except Exception as error:  # of a value's own code, too
        # Without the value: the addresses that many show would give a policy other words in every run.
        return _reply(call, fault=f"it returned {type(result).__name__}, which cannot be written as JSON ({error})")
    if len(reply) > RESULT_BYTES:
        return _reply(call, fault=f"it returned {len(reply)} bytes, and {RESULT_BYTES} at most are read")
    return reply


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _reply(call: int, **content: Any) -> bytes:
    return json.dumps({"call": call, **content}, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Numbers of other libraries, alone or in arrays; bytes would be read as the digits they spell."""
    if isinstance(value, bytes | bytearray):
        raise TypeError(f"{value!r:.80} is no number")
    if callable(to_list := getattr(value, "tolist", None)):  # numpy, torch, pandas, ...
        return to_list()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{type(value).__name__} is no number, text, list or mapping") from None


def _is_ours(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen importlib") or file == importlib.__file__


def _fault(error: BaseException) -> str:
    """The traceback below this file and Python's own importing; the error alone where nothing is below them."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = next((i for i, frame in enumerate(frames) if not _is_ours(frame.filename)), None)
    below = error.__traceback__
    for _ in range(theirs or 0):
        assert below is not None, "a traceback has as many entries as frames"
        below = below.tb_next
    text = "".join(traceback.format_exception(type(error), error, None if theirs is None else below))
    return text if len(text) <= FAULT_CHARACTERS else f"...{text[-FAULT_CHARACTERS:]}"


def _flush_output() -> None:
    """Hand over what was printed, so that it is shown with the call; the function may have closed or replaced it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


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


def _limit_memory(more: int) -> None:
    """Let this process take so many bytes of address space beyond what it has, where the system says what it has."""
    with contextlib.suppress(OSError, ValueError):
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
