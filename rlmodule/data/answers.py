"""The answer out of a column that holds more: behind a mark (GSM8K's ``#### 18``), or in a box of TeX."""

from __future__ import annotations

import re

_BOXES = {r"\boxed": (r"\boxed", r"\fbox")}  # MATH has both
_ARGUMENT = re.compile(r"\s*(\\[A-Za-z]+|[^\s$])")  # of a command of TeX without braces


def find_answer(text: str, mark: str) -> str | None:
    """What stands behind the last ``mark``, spaces around it aside; None where the mark is missing.

    A mark that begins with a backslash is a command of TeX, and the answer is its argument, braces in braces included.
    """
    marks = _BOXES.get(mark.removesuffix("{"), (mark,))
    last = max(marks, key=text.rfind)
    if last not in text:
        return None
    rest = text[text.rfind(last) + len(last) :]
    if not mark.startswith("\\"):
        return rest.strip()
    if rest.lstrip().startswith("{"):
        return _in_braces(rest.lstrip()[1:])
    found = _ARGUMENT.match(rest)
    return found[1] if found else None


def _in_braces(text: str) -> str | None:
    """The text up to the brace that closes the one before it; None where none does."""
    depth = 1
    for end, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0) * (text[end - 1 : end] != "\\")
        if depth == 0:
            return text[:end].strip()
    return None
