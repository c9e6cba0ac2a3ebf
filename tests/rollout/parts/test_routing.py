"""A request goes to a server that can answer it, and is not asked for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rlmodule.core.errors import TrainingError
from rlmodule.rollout.parts.http_client import ServerGoneError
from rlmodule.rollout.parts.routing import Place, Router


class Named:
    """A server that is asked nothing here."""

    def __init__(self, url: str) -> None:
        self.url = url


def test_a_request_that_no_server_survives_ends_in_words_and_not_in_a_circle():
    """Each comes back in good health, and loses the same request again."""
    servers: list[Any] = [Named("http://a"), Named("http://b")]
    asked: list[str] = []

    def question(api: Any) -> None:
        asked.append(api.url)
        raise ServerGoneError(f"{api.url} did not answer in time")

    router = Router([Place(server) for server in servers], lambda api, given_up: True)
    with pytest.raises(TrainingError, match=r"lost a request .* did not answer in time"):
        router.ask(question, threading.Event())
    assert 2 <= len(asked) < 20
    assert all(place.in_flight == 0 for place in router.places)
