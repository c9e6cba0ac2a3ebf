"""The words of a command line before Hydra reads them: a command's name in front, and keys of open mappings.

Leaves out reading KEY=VALUE, which is Hydra's (``cli.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence

from rlmodule.core.errors import ConfigError, did_you_mean

# Mappings whose keys are the user's: the chat template's, the model family's, the reward function's.
OPEN_MAPPINGS = (
    *("data.chat_template_args", "model.architecture", "model.shape", "critic.architecture"),
    *("reward.arguments", "reward.function.arguments", "reward.sources"),
)
# A key and what is chosen where it is set; for commands about a policy, which need no training set-up. The sizes of a
# built-in environment fit no model but the built-in one.
IMPLIED = (
    ("model.path", "model=local", {"model"}),
    ("data.train_files", "data=files", {"data"}),
    ("data.val_files", "data=files", {"data", "environment", "data.train_files"}),
    ("data.val_files", "data.train_files=[]", {"data", "environment", "data.train_files"}),  # which data=files asks for
    ("model.path", "environment=none", {"data", "environment"}),
)
ONE, SEVERAL = "run", "runs"  # keys of a command that take words which are no KEY=VALUE


def with_command(
    arguments: Sequence[str], commands: Collection[str], keys_of: Callable[[str], Collection[str]]
) -> list[str]:
    """``parity seed=1`` -> ``command=parity seed=1``; ``compare a b`` -> ``command=compare command.runs=["a","b"]``.

    A line without a command's name stays as it is.

    Args:
        arguments: of the program.
        commands: names there are.
        keys_of: command -> its keys.

    Raises:
        ConfigError: the first word is neither a command, an option nor KEY=VALUE; or the command takes no such words.
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
    words, keys = [word for word in rest if _is_bare(word)], keys_of(first)
    settings = [word for word in rest if word not in words]
    if words:
        settings.append(_as_setting(first, words, keys))
    if ONE in keys:
        settings = _with_implied(settings)
    return [f"command={first}", *settings]


def with_open_mappings(arguments: Sequence[str]) -> list[str]:
    """Let keys of open mappings be set as any other: Hydra itself wants ``++`` before a key it does not know."""
    return [f"++{word}" if _reaches_into_open_mapping(word) else word for word in arguments]


def _is_bare(word: str) -> bool:
    """Whether a word is no option and no setting; a path may hold an equals sign, and a setting be too long for one."""
    return not word.startswith(("-", "~", "+")) and ("=" not in word or os.path.exists(word))


def _as_setting(command: str, words: Sequence[str], keys: Collection[str]) -> str:
    """The setting that words behind a command's name stand for."""
    quoted = [json.dumps(word, ensure_ascii=False) for word in words]
    if SEVERAL in keys:
        return f"command.{SEVERAL}=[{','.join(quoted)}]"
    if ONE in keys and len(words) == 1:
        return f"command.{ONE}={quoted[0]}"
    raise ConfigError(
        key="command",
        got=f"{command} {' '.join(words)}",
        because=f"{command} takes {'one run' if ONE in keys else 'no words'}, and a setting is written KEY=VALUE",
        fix="Leave them out, or write KEY=VALUE",
    )


def _with_implied(words: Sequence[str]) -> list[str]:
    """The settings, with the choices that they imply where none is made and no run gives them."""
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    if keys & {f"command.{ONE}", "experiment"}:
        return list(words)
    return [*(choice for key, choice, chosen in IMPLIED if key in keys and not keys & chosen), *words]


def _reaches_into_open_mapping(word: str) -> bool:
    key, equals, value = word.partition("=")
    if not equals or key.startswith(("+", "~", "-")):
        return False
    return key.startswith(tuple(f"{name}." for name in OPEN_MAPPINGS)) or (
        key in OPEN_MAPPINGS and value.startswith("{")
    )
