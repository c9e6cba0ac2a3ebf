"""Rows of an environment, checked where they come in: they may be made by code of others.

Leaves out what the columns mean (``data/formats.py``) and what episodes say (``experience/checked_replies.py``).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlmodule.core.contract import Environment
from rlmodule.core.errors import ConfigError, RLModuleError


def checked_rows(environment: Environment, name: str, split: str) -> Sequence[dict[str, Any]]:
    """The rows of an environment as a sequence of mappings with texts as keys.

    Args:
        environment: makes them.
        name: of the environment.
        split: ``train`` or ``test``.

    Raises:
        ConfigError: they are none, there are none, or the user's code fails.
    """

    def error(because: str) -> ConfigError:
        fix = f"Have rows({split!r}) return a list of rows such as {{'prompt': 'What is 2 + 3?', 'answer': '5'}}"
        return ConfigError(key="environment", got=name, because=because, fix=fix)

    try:
        given: object = environment.rows(split)
        is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
        rows = list(given) if is_list else []  # type: ignore[call-overload]
    except RLModuleError:
        raise
    except Exception:
        if type(environment).__module__.startswith("rlmodule."):
            raise  # a bug of ours
        words = traceback.format_exc(limit=-3)
        raise ConfigError(
            key="environment", got=name, because=f"rows({split!r}) fails", fix=f"Its own words:\n{words}"
        ) from None
    if not is_list:
        raise error(f"rows({split!r}) gave {type(given).__name__} {given!r:.80}, which is no list of rows")
    if not rows:
        raise error(f"rows({split!r}) gave no row")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
            raise error(f"row {number} of rows({split!r}) is {row!r:.80} and no mapping of column names to values")
    return [row if isinstance(row, dict) else dict(row) for row in rows]
