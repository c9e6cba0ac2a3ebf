"""Writing while training goes on: one thread, whose result is collected later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_background(write: Callable[[], str | None]) -> Future[str | None]:
    """Start ``write``, which returns what went wrong or None, in a daemon thread: it keeps no dying process alive."""
    outcome: Future[str | None] = Future()

    def run() -> None:
        try:
            outcome.set_result(write())
        except BaseException as error:  # raised again where the result is collected
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="checkpoint-writer").start()
    return outcome
