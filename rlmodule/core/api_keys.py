"""Keys of servers: they stand in environment variables, and in no file, log or message of ours.

What is wrong with a key is said here, before Python's own HTTP code would repeat it in an error.
"""

from __future__ import annotations

import os
import re

from rlmodule.core.errors import ConfigError

HIDDEN = "*****"


def check_key_name(variable: str) -> None:
    """Refuse what is no name of an environment variable, which is most likely the key itself.

    Raises:
        ConfigError: without repeating it.
    """
    if variable and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", variable):
        raise ConfigError(
            key="api_key_env",
            got=HIDDEN,
            because="it takes the name of an environment variable, not the key itself",
            fix="export OPENAI_API_KEY=..., and api_key_env=OPENAI_API_KEY",
        )


def key_in(variable: str, *, section: str = "") -> str:
    """The key in an environment variable, without the white space around it; empty where none is named.

    Args:
        variable: its name.
        section: of the setting that names it, with a dot behind, for errors.

    Raises:
        ConfigError: it is not set, or holds what a header cannot.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        because = "no such environment variable is set"
        raise ConfigError(key=f"{section}api_key_env", got=variable, because=because, fix=f"export {variable}=...")
    if not re.fullmatch("[!-~]+", key):
        raise ConfigError(
            key=f"{section}api_key_env",
            got=variable,
            because="the key in it holds a line break, a space or a letter beyond ASCII, and no HTTP header can",
            fix=f"export {variable}=... with the key alone",
        )
    return key


def authorization(key: str) -> dict[str, str]:
    """The header that carries a key; none for an empty one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def without_key(text: str, key: str) -> str:
    """What a server said, where it may have repeated the key."""
    return text.replace(key, HIDDEN) if key else text
