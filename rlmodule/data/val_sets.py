"""Validation sets: ``data.val_files`` is a list of files, several such lists by name, or None."""

from __future__ import annotations

import re
from typing import Any

from rlmodule.core.errors import ConfigError


def sets_of(val_files: Any) -> dict[str, list[str]]:
    """Name of each validation set -> its files, without sets that have none; a plain list is a set without a name."""
    sets = val_files if isinstance(val_files, dict) else {"": val_files or []}
    found = {str(name): [files] if isinstance(files, str) else list(files) for name, files in sets.items()}
    return {name: files for name, files in found.items() if files}


def check_val_files(val_files: Any) -> None:
    """Refuse what is neither files nor a mapping of names to files.

    Raises:
        ConfigError: it is something else, or a name cannot be part of the name of a metric.
    """
    is_mapping = isinstance(val_files, dict)
    for name, given in (val_files if is_mapping else {"list": val_files or []}).items():
        files = [given] if is_mapping and isinstance(given, str) else given
        if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
            raise ConfigError(
                key="val_files",
                got=val_files,
                because="it is neither a list of files nor a mapping of set names to files",
                fix="Write 'data.val_files=[FILE]' or 'data.val_files={NAME:[FILE],OTHER:[FILE]}'",
            )
        if re.fullmatch(r"[\w.-]+", str(name)) is None:
            raise ConfigError(
                key="val_files",
                got=name,
                because="the name of a validation set becomes part of the names of metrics",
                fix="Use letters, digits, dots, dashes and underscores",
            )
