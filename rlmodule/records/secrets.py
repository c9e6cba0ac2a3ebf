"""Keeps passwords and keys out of every file that a run writes.

Values that come from the environment (``${oc.env:...}``) are stored as they were written, other values of keys that
look like secrets are masked, and handed to the ranks of a run through their environment. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MASK = "*****"
VARIABLE = "RLMODULE_SECRETS"  # dotted key -> value, JSON; for the ranks that a supervisor starts
_NAMES = re.compile(
    r"(^|[_-])(api[_-]?key|(secret|private|access)[_-]?key|secret|password|passwd|credentials?"
    r"|(auth|access|api|hf|bearer|refresh|wandb)[_-]?token)$|^(token|key)$",
    re.IGNORECASE,
)


def looks_secret(key: str) -> bool:
    """Whether a dotted key names a password, a token or the like."""
    return _NAMES.search(key.rpartition(".")[2]) is not None


def mask(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration with its secrets masked, and the secrets by dotted key.

    Args:
        config: nested mappings; references to the environment are still written as ``${oc.env:...}``.
    """
    secrets: dict[str, Any] = {}

    def walk(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in node.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping):
                out[name] = walk(value, f"{key}.")
            elif value and isinstance(value, str) and looks_secret(key) and "${oc.env:" not in value:
                secrets[key], out[name] = value, MASK
            else:
                out[name] = value
        return out

    return walk(config, ""), secrets


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with the values of its secrets masked."""
    return [_masked_word(word) for word in arguments]


def mask_file(path: Path, arguments: Sequence[str]) -> None:
    """Mask the values of a command line's secrets in a file that somebody else has written; nothing where none is."""
    pairs = zip(arguments, mask_arguments(arguments), strict=True)
    typed = [word.partition("=")[2] for word, masked in pairs if word != masked]
    values = sorted({*typed, *(value.strip("'\"") for value in typed)} - {""}, key=len, reverse=True)
    if values and path.is_file():
        text = path.read_text(encoding="utf-8")
        for value in values:
            text = text.replace(value, MASK)
        path.write_text(text, encoding="utf-8")


def without_values(arguments: Sequence[str]) -> list[str]:
    """As ``mask_arguments``, with references masked as well: what they stand for may come from the environment."""
    masked = mask_arguments(arguments)
    return [f"{word.partition('=')[0]}={MASK}" if "${" in word else word for word in masked]


def _masked_word(word: str) -> str:
    key, equals, value = word.partition("=")
    hide = equals and looks_secret(key.lstrip("+~")) and "${oc.env:" not in value
    return f"{key}={MASK}" if hide else word


def to_environment(secrets: Mapping[str, Any]) -> None:
    """Let processes that this one starts find the secrets."""
    if secrets:
        os.environ[VARIABLE] = json.dumps(secrets)


def from_environment() -> dict[str, Any]:
    """The secrets that the process which started this one has handed on."""
    found = json.loads(os.environ.get(VARIABLE, "{}"))
    assert isinstance(found, dict), f"{VARIABLE} holds a mapping"
    return found
