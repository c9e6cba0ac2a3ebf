"""A write that goes on while the run does: one thread, whose outcome is asked for later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_background(write: Callable[[], str | None]) -> Future[str | None]:
    """Start ``write``, which returns what went wrong, in a thread that does not keep a dying process alive."""
    outcome: Future[str | None] = Future()

    def run() -> None:
        try:
            outcome.set_result(write())
        except BaseException as error:  # raised again where the outcome is asked for
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="checkpoint-writer").start()
    return outcome
