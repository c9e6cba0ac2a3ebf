"""The words of a command line before Hydra reads them: a command's name in front, and keys of open mappings.

Leaves out reading KEY=VALUE, which is Hydra's (``cli.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlmodule.core.errors import ConfigError, did_you_mean

# Mappings whose keys are the user's: the chat template's, the model family's, the reward function's.
OPEN_MAPPINGS = (
    "data.chat_template_args",
    "model.architecture",
    "model.shape",
    "critic.architecture",
    "reward.arguments",
)


def with_command(arguments: Sequence[str], commands: Collection[str]) -> list[str]:
    """``parity seed=1`` -> ``command=parity seed=1``; a line without a command's name stays as it is.

    Raises:
        ConfigError: the first word is neither a command, an option nor KEY=VALUE.
    """
    first, *rest = [*arguments] or [""]
    if not first.replace("_", "").replace("-", "").isalpha() or first.startswith("-"):
        return list(arguments)
    if first not in commands:
        raise ConfigError(
            key="command",
            got=first,
            because="no command has that name, and a setting is written KEY=VALUE",
            fix=did_you_mean(first, commands),
        )
    return [f"command={first}", *rest]


def with_open_mappings(arguments: Sequence[str]) -> list[str]:
    """Let keys of open mappings be set as any other: Hydra itself wants ``++`` before a key it does not know."""
    return [f"++{word}" if _reaches_into_open_mapping(word) else word for word in arguments]


def _reaches_into_open_mapping(word: str) -> bool:
    key, equals, value = word.partition("=")
    if not equals or key.startswith(("+", "~", "-")):
        return False
    return key.startswith(tuple(f"{name}." for name in OPEN_MAPPINGS)) or (
        key in OPEN_MAPPINGS and value.startswith("{")
    )
