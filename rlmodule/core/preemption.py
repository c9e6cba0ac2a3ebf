"""A scheduler's warning (SIGTERM, SIGUSR1): acted on at once where nothing would be lost, else after the step that
runs.

While a run has trained something that is not saved, the signal is remembered: the flag travels with the metrics of the
step, so ranks that got no signal stop with those that did, and the state is saved first. At all other times (imports,
warm start, sampling right after a checkpoint, a run without checkpoints) the process ends within moments. A scheduler
often signals every process of a job, and a supervisor passes its own signal on, so a signal that comes again within
``REPEAT_SECONDS`` is the same request; a later one ends the process whatever it is doing. What is being written then
lies aside and is never taken for whole. Standard library only; leaves out the saving (``callbacks/checkpoint.py``).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from rlmodule.core.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REPEAT_SECONDS = 5.0
EXIT_CODE = 75  # EX_TEMPFAIL: try again later
NOTHING_SAVED = "nothing was trained yet, so nothing was saved; start it again"


class PreemptionHandler:
    """Whether this process was asked to stop, between ``install`` and ``uninstall``.

    Args:
        at_rest: what to say when the process ends at once, which it does while this is not None.
        before_exit: called before such an end, for instance to remove an empty folder.
    """

    def __init__(self, at_rest: str | None = NOTHING_SAVED, before_exit: Callable[[], None] = lambda: None) -> None:
        self.at_rest = at_rest
        self.signal_received: signal.Signals | None = None
        self._before_exit = before_exit
        self._received_at = 0.0
        self._before: dict[signal.Signals, object] = {}
        self._owner = os.getpid()

    def install(self) -> None:
        """Take the signals over; a thread that is not the main one cannot, and leaves them alone."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._owner = os.getpid()
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}

    def uninstall(self) -> None:
        """Give the signals back to the handlers they had before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a worker forked from the training process: it ends at once
            os._exit(128 + number)
        now = time.monotonic()
        if self.signal_received is None:
            self.signal_received, self._received_at = signal.Signals(number), now
        elif now - self._received_at > REPEAT_SECONDS:
            os._exit(128 + number)
        if self.at_rest is not None:
            self._before_exit()
            # Not print(): the signal may have come in the middle of one.
            os.write(2, f"stopped: {self.signal_received.name}: asked to stop; {self.at_rest}\n".encode())
            os._exit(EXIT_CODE)

    def stop(self, folder: object) -> None:
        """End the run, whose state is in ``folder``.

        Raises:
            Preempted: always.
        """
        why = "another rank was" if self.signal_received is None else f"{self.signal_received.name}:"
        raise Preempted(f"{why} asked to stop; saved {folder}. Go on with resume=auto")
