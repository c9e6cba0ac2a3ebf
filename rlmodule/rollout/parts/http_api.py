"""What servers of several dialects have in common as they are asked by HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from rlmodule.rollout.parts.http_client import HTTPClient, ServerGoneError, ServerRefusedError

QUICK = 10.0  # seconds for what needs no computing
RELOAD = "/update_weights_from_disk"  # where servers of several makes take new weights


@dataclass(eq=False)
class HTTPApi:
    """Part of a ``ServerApi``: a server that can do the least."""

    client: HTTPClient

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url

    def knock(self) -> None:
        """Ask whether it is ready."""
        self.client.get("/health", timeout=QUICK)

    def is_ready(self) -> bool:
        """Whether it answers that."""
        with suppress(ServerGoneError, ServerRefusedError):
            self.knock()
            return True
        return False

    def load_adapter(self, folder: Path, version: int) -> None:
        """It takes none."""
        raise AssertionError("adapters are merged for it")

    def pause(self, mode: str) -> None:
        """It cannot."""
        raise AssertionError("its responses end before its weights change")

    def resume(self) -> None:
        """It was never paused."""

    def checksums(self) -> Mapping[str, str]:
        """It gives none."""
        return {}

    def hang_up(self) -> None:
        """Give up every request under way: a server ends one whose connection breaks."""
        self.client.hang_up()

    def close(self) -> None:
        """Close its connections."""
        self.client.close()

    def unreadable(self, what: str, said: object = None) -> ServerRefusedError:
        """The error for an answer in which ``what`` is missing, with the begin of what it ``said`` instead."""
        words = "" if said is None else f": {self.client.words(json.dumps(said).encode())}"
        return ServerRefusedError(f"{self.url} answered without {what}{words}", 200)


def token_ids(given: Iterable[Any]) -> tuple[int, ...]:
    """Token ids of an answer; TypeError where one is no whole number."""
    return tuple(map(index, given))


def whole_number(given: Any) -> int | None:
    """A limit that a server names; None where it names none, or something else."""
    return given if isinstance(given, int) and given > 0 else None
