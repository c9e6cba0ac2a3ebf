"""Conversations as other projects write them -> turns with role and content: ShareGPT's, and transcripts in one text.

Leaves out the checks that every conversation gets (``messages.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlmodule.data.json_text import turns_in
from rlmodule.data.messages import ChatError, check_messages, described

# Who speaks in ShareGPT's files and in those that follow them -> the role of the turn.
SHAREGPT_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


def read_conversation(value: Any, marks: Mapping[str, str]) -> str | Sequence[Mapping[str, Any]]:
    """A text, or checked turns.

    Args:
        value: a text, one turn or several (or their JSON text), each with ``role`` and ``content`` or with
            ``from`` and ``value``.
        marks: mark -> role; a text is then a transcript, and each mark in it begins a turn.

    Raises:
        ChatError: it is none of these.
    """
    if isinstance(value, str):
        try:
            written = turns_in(value)
        except ValueError as error:
            raise ChatError(f"it holds {error}; write it with json.dumps") from None
        if written is None:
            return _transcript(value, marks) if marks else value
        value = written
    turns = [value] if isinstance(value, Mapping) else value
    if isinstance(turns, list | tuple):
        turns = [_with_role(turn, number) for number, turn in enumerate(turns, start=1)]
    check_messages(turns)
    # A key that is null is one that the turn does not have; templates ask whether a key is there.
    return [{name: entry for name, entry in turn.items() if entry is not None} for turn in turns]


def _with_role(turn: Any, number: int) -> Any:
    """A turn in ShareGPT's words in ours; others as they are."""
    if not isinstance(turn, Mapping) or turn.get("role") is not None or "from" not in turn:
        return turn
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker.lower() not in SHAREGPT_ROLES:
        raise ChatError(
            f"turn {number} is from {described(speaker)}, which is none of {', '.join(sorted(SHAREGPT_ROLES))}"
        )
    rest = {name: entry for name, entry in turn.items() if name not in ("from", "value", "role")}
    return {"role": SHAREGPT_ROLES[speaker.lower()], "content": turn.get("value"), **rest}


def _transcript(text: str, marks: Mapping[str, str]) -> list[dict[str, str]]:
    """The turns of a text in which marks begin them."""
    longest_first = sorted(marks, key=len, reverse=True)
    before, *parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    if before.strip() or not parts:
        raise ChatError(f"the text does not begin with one of {', '.join(map(repr, marks))}: {described(text)}")
    spoken = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": marks[mark], "content": words.strip()} for mark, words in spoken]
