"""Rows of an environment, checked where they come in: they may be made by code of others.

Leaves out what the columns mean (``data/formats.py``) and what episodes say (``experience/checked_replies.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlmodule.core.errors import ConfigError


def checked_rows(given: object, name: str, split: str) -> Sequence[dict[str, Any]]:
    """The rows as a sequence of mappings with texts as keys.

    Args:
        given: what ``rows(split)`` returned.
        name: of the environment.
        split: ``train`` or ``test``.

    Raises:
        ConfigError: they are none, or there are none.
    """

    def error(because: str) -> ConfigError:
        fix = f"Have rows({split!r}) return a list of rows such as {{'prompt': 'What is 2 + 3?', 'answer': '5'}}"
        return ConfigError(key="environment", got=name, because=because, fix=fix)

    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise error(f"rows({split!r}) gave {type(given).__name__} {given!r:.80}, which is no list of rows")
    rows = given if isinstance(given, list) else list(given)
    if not rows:
        raise error(f"rows({split!r}) gave no row")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
            raise error(f"row {number} of rows({split!r}) is {row!r:.80} and no mapping of column names to values")
    return [row if isinstance(row, dict) else dict(row) for row in rows]
