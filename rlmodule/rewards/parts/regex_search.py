"""Looks for a regular expression. Runs in a child process of a pool, which imports this file by its path."""

from __future__ import annotations

import re


def is_found(pattern: str, method: str, text: str) -> bool:
    """Whether ``re.<method>`` finds ``pattern`` in ``text``."""
    search = {"search": re.search, "match": re.match, "fullmatch": re.fullmatch}[method]
    return search(pattern, text) is not None
