"""A scheduler's warning (SIGTERM, SIGUSR1): remembered when it comes, acted on between two optimizer steps.

The flag travels with the metrics of the step, so ranks that got no signal stop with those that did and nothing more is
exchanged. A second signal ends the process at once; what is being written then lies aside and is never taken for whole.
Leaves out the saving (``callbacks/checkpoint.py``).
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from rlmodule.core.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Whether this process was asked to stop, while ``listen`` is in force."""

    def __init__(self) -> None:
        self.asked_by: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}
        self._owner = os.getpid()

    def listen(self) -> None:
        """Take the signals over; a thread that is not the main one cannot, and leaves them alone."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._owner = os.getpid()
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}

    def let_go(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a worker forked from the training process just ends
            os._exit(128 + number)
        if self.asked_by is not None:
            os._exit(128 + number)
        self.asked_by = signal.Signals(number)

    def stop(self, folder: object) -> None:
        """End the run.

        Raises:
            Preempted: always.
        """
        why = "another rank was" if self.asked_by is None else f"{self.asked_by.name}:"
        raise Preempted(f"{why} asked to stop; saved {folder}. Go on with resume=auto")
