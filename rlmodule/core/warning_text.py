"""Warnings on the terminal: those that this project gives are one line of words, without file and source line."""

from __future__ import annotations

import warnings
from pathlib import Path

_default = warnings.formatwarning
OWN_FOLDERS = (str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "strategies"))


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The text of one warning; those of other packages are as Python writes them."""
    if category is UserWarning and filename.startswith(OWN_FOLDERS):
        return f"warning: {message}\n"
    return _default(message, category, filename, lineno, line)


def show_own_warnings_as_words() -> None:
    """From now on, in this process."""
    warnings.formatwarning = format_warning
