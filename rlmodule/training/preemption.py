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


class PreemptionHandler:
    """Whether this process was asked to stop, while ``subscribe`` is in force."""

    def __init__(self) -> None:
        self.signal_received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}
        self._owner = os.getpid()

    def subscribe(self) -> None:
        """Take the signals over; a thread that is not the main one cannot, and leaves them alone."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._owner = os.getpid()
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}

    def uninstall(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a worker forked from the training process just ends
            os._exit(128 + number)
        if self.signal_received is not None:
            os._exit(128 + number)
        self.signal_received = signal.Signals(number)

    def stop(self, folder: object) -> None:
        """End the run.

        Raises:
            Preempted: always.
        """
        why = "another rank was" if self.signal_received is None else f"{self.signal_received.name}:"
        raise Preempted(f"{why} asked to stop; saved {folder}. Go on with resume=auto")
