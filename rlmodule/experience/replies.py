"""What environments are asked, several at a time and each with a time limit, answered in the order of asking.

An environment is code of others: it may fail, wait for a server, or never return. A call that fails or overruns its
time gives a ``Failure`` and disturbs no other call. Leaves out what is asked (``episodes.py``).
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rlmodule.core.errors import RLModuleError

Key = TypeVar("Key")
FAULT_CHARACTERS = 2000  # of one traceback, the last ones


@dataclass(frozen=True)
class Failure:
    """A call without a result: what went wrong, and whether its time was up."""

    text: str
    timed_out: bool = False


@dataclass(eq=False)
class _Call:
    """One call, and its result once ``done`` is set; ``began`` in seconds of the monotonic clock."""

    function: Callable[[], object]
    result: object = None
    began: float | None = None
    is_given_up: bool = False
    started: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        self.began = time.monotonic()
        self.started.set()
        try:
            self.result = self.function()
        except RLModuleError as error:  # of a setting or of the data: the run's own business
            self.result = error
        except (Exception, SystemExit) as error:
            text = "".join(traceback.format_exception(error))
            self.result = Failure(text if len(text) <= FAULT_CHARACTERS else f"...{text[-FAULT_CHARACTERS:]}")
        self.done.set()


class Replies(Generic[Key]):
    """Calls under way.

    Args:
        num_workers: threads that make them; 0 makes each at once in the caller's own, without a time limit.
        seconds: that a call may take. A thread cannot be ended, so one that overruns is left behind and replaced.
    """

    def __init__(self, num_workers: int, seconds: float) -> None:
        self.num_workers, self.seconds = num_workers, seconds
        self._asked: deque[tuple[Key, _Call]] = deque()
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._num_started = 0

    def __len__(self) -> int:
        """Calls whose result was not taken yet."""
        return len(self._asked)

    def ask(self, key: Key, function: Callable[[], object]) -> None:
        """Have ``function`` called; ``take`` gives its result under ``key``."""
        call = _Call(function)
        self._asked.append((key, call))
        if not self.num_workers:
            call.run()
            return
        self._waiting.put(call)
        if self._num_started < min(self.num_workers, len(self._asked)):
            self._start_worker()

    def take(self) -> tuple[Key, object]:
        """(key, result or Failure) of the call that was asked for first, once it is there.

        Raises:
            RLModuleError: the call raised it.
        """
        key, call = self._asked.popleft()
        result = call.result if self._is_done(call) else self._give_up(call)
        if isinstance(result, RLModuleError):
            raise result
        return key, result

    def close(self) -> None:
        """Let the threads end; those in the middle of a call end with it."""
        for _ in range(self._num_started):
            self._waiting.put(None)
        self._num_started = 0

    def _is_done(self, call: _Call) -> bool:
        """Whether a call ends in time; those before it have ended or were given up, so a thread is free for it."""
        if not self.num_workers:
            return True
        call.started.wait()
        assert call.began is not None, "a call that has started knows when"
        return call.done.wait(max(0.0, call.began + self.seconds - time.monotonic()))

    def _give_up(self, call: _Call) -> Failure:
        call.is_given_up = True
        self._start_worker()
        return Failure(f"no reply within {self.seconds:g} seconds", timed_out=True)

    def _start_worker(self) -> None:
        self._num_started += 1
        threading.Thread(target=self._work, daemon=True, name="environment").start()

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            call.run()
            if call.is_given_up:  # another thread has its place
                self._num_started -= 1
                return
