"""Signs of life: every rank gives them from a thread of its own, and the supervisor notices when one stops.

A frozen process (SIGSTOP, a debugger, a dead disk) gives none; one that computes or waits for its peers does. Ranks
that wait for each other for ever are found by the time limit of their collectives. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

INTERVAL_SECONDS = 1.0


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank gives its signs of life."""
    return folder / f"rank_{rank}.alive"


def beat(file: Path) -> Callable[[str], None]:
    """Give a sign of life every second for as long as this process lives.

    Returns:
        What to call with each phase that begins, in a word or two.
    """

    def enter(phase: str) -> None:
        sign = {"host": socket.gethostname(), "pid": os.getpid(), "phase": phase}
        with suppress(OSError):  # a full disk is for others to say
            file.write_text(json.dumps(sign))

    def keep_touching() -> None:
        while True:
            with suppress(OSError):
                os.utime(file)  # takes no space
            time.sleep(INTERVAL_SECONDS)

    enter("start")
    threading.Thread(target=keep_touching, daemon=True, name="heartbeat").start()
    return enter


class Heartbeats:
    """The signs of life of the ranks of a machine, as the supervisor reads them.

    Args:
        folder: where ranks give them.
        ranks: their numbers.
        timeout: seconds of silence after which a rank counts as frozen.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], timeout: float) -> None:
        self.folder, self.timeout = folder, timeout
        self._ranks = ranks
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> time stamp of its file, and when it was first seen
        self._looked_at = time.monotonic()

    def silent(self) -> str | None:
        """Words for a rank that has been silent for too long; None while all show signs of life.

        A rank that has not begun yet is left alone: what it imports may take its time.
        """
        now = time.monotonic()
        if now - self._looked_at < INTERVAL_SECONDS:
            return None
        if now - self._looked_at > 10 * INTERVAL_SECONDS:  # this process was frozen itself, perhaps with its ranks
            self._seen.clear()
        self._looked_at = now
        for rank in self._ranks:
            try:
                stamp = file_of(self.folder, rank).stat().st_mtime_ns
            except OSError:
                continue
            known, since = self._seen.get(rank, (0, now))
            if stamp != known:
                self._seen[rank] = (stamp, now)
            elif now - since > self.timeout:
                return self._words(rank, now - since)
        return None

    def _words(self, rank: int, seconds: float) -> str:
        try:
            sign = json.loads(file_of(self.folder, rank).read_text())
        except (OSError, ValueError):
            sign = {}
        who = f"rank {rank} (process {sign.get('pid', '?')} on {sign.get('host', '?')})"
        return (
            f"{who} froze in phase '{sign.get('phase', '?')}': no sign of life for {seconds:.0f} seconds, and "
            "trainer.timeout allows no more"
        )
