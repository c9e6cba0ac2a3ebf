"""JSON text -> values that can be written again. Leaves out files (``files.py``)."""

from __future__ import annotations

import json
import re
from typing import Any

HALF_PAIR = "it holds half of a surrogate pair, which is not valid Unicode"

_FIRST_KEYS = ("role", "from")  # of a turn
_PRINTED_BY_PYTHON = tuple(f"[{{'{key}'" for key in _FIRST_KEYS)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape of one, paired or not


def load_json(text: str) -> Any:
    """The value that ``text`` stands for.

    Raises:
        ValueError: it is not JSON, or holds text that is not valid Unicode, which nothing could write or print later.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _SURROGATE.search(text) and not is_unicode(value):
        raise ValueError(HALF_PAIR)
    return value


def turns_in(text: str) -> list[Any] | None:
    """The conversation whose JSON text this is; None for any other text.

    Raises:
        ValueError: it is one as Python prints it, which is not JSON.
    """
    if text.startswith(_PRINTED_BY_PYTHON):
        raise ValueError("turns as Python prints them, not as JSON")
    if not (text.startswith("[") and text[1:].lstrip().startswith("{")):
        return None
    try:
        turns = load_json(text)
    except ValueError:
        return None
    is_conversation = all(isinstance(turn, dict) and not turn.keys().isdisjoint(_FIRST_KEYS) for turn in turns)
    return turns if is_conversation else None


def is_unicode(value: Any) -> bool:
    """Whether every text in the value has a UTF-8 form."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True
