"""Preemption: SIGTERM or SIGUSR1 from a scheduler is recorded, and the run stops after the current optimizer step.

The flag is reduced together with the metrics of the step, so all ranks stop after the same step without a collective of
their own. A second signal ends the process at once; a checkpoint that is being written then stays incomplete and is not
resumed from. Leaves out the saving (``callbacks/checkpoint.py``).
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from rlmodule.core.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class PreemptionHandler:
    """Records the signals that this process receives between ``subscribe`` and ``uninstall``.

    Attributes:
        signal_received: the first one, None so far.
    """

    def __init__(self) -> None:
        self.signal_received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}
        self._owner = os.getpid()

    def subscribe(self) -> None:
        """Install the signal handlers; does nothing outside of the main thread, where Python cannot."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._owner = os.getpid()
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}

    def uninstall(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a worker forked from the training process: it ends at once
            os._exit(128 + number)
        if self.signal_received is not None:
            os._exit(128 + number)
        self.signal_received = signal.Signals(number)

    def stop(self, folder: object) -> None:
        """End the run, whose state was saved in ``folder``.

        Raises:
            Preempted: always.
        """
        why = "another rank was" if self.signal_received is None else f"{self.signal_received.name}:"
        raise Preempted(f"{why} asked to stop; saved {folder}. Go on with resume=auto")
