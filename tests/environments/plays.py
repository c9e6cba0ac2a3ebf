"""Episodes played by a script in the place of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlmodule.core.episodes import Completion, Done
from rlmodule.core.types import Prompt


def said(text: str, finish_reason: str = "stop") -> Completion:
    """A response."""
    return Completion(0, torch.tensor([0]), torch.zeros(1), finish_reason, 0, text, text)


def prompt_of(row: dict[str, Any]) -> Prompt:
    """A row as episodes get it."""
    return Prompt(0, (1,), row["prompt"], row.get("answer"), row["source"], row)


def play(environment: Any, row: dict[str, Any], texts: Sequence[str]) -> tuple[list[str], Done]:
    """(what is shown after each text but the last, the end)."""
    episode, shown = environment.start(prompt_of(row)), []
    for text in texts:
        reply = episode.reply(said(text))
        if isinstance(reply, Done):
            return shown, reply
        assert reply.messages is not None
        shown += [str(message["content"]) for message in reply.messages]
    raise AssertionError(f"it does not end; shown so far: {shown}")
