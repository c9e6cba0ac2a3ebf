"""The words of a command line before Hydra reads them: a command's name in front, and keys of open mappings.

Leaves out reading KEY=VALUE, which is Hydra's (``cli.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence

from rlmodule.core.errors import ConfigError, did_you_mean

# Mappings whose keys are the user's: the chat template's, the model family's, the reward function's, the environment's.
OPEN_MAPPINGS = (
    *("data.chat_template_args", "data.turn_marks", "model.architecture", "model.shape", "critic.architecture"),
    *("reward.arguments", "reward.function.arguments", "reward.sources", "advantage.weights"),
    *("environment.arguments", "environment.settings", "environment.reset"),
)
# A key and what is chosen where it is set. The first holds for every line.
IMPLIED = (("model.path", "model=local", {"model"}),)
# These for commands about a policy, which need no training set-up. The sizes of a built-in environment fit no model but
# the built-in one.
IMPLIED_ABOUT_A_POLICY = (
    *IMPLIED,
    ("data.train_files", "data=files", {"data"}),
    ("data.val_files", "data=files", {"data", "environment", "data.train_files"}),
    ("data.val_files", "data.train_files=[]", {"data", "environment", "data.train_files"}),  # which data=files asks for
    ("model.path", "environment=none", {"data", "environment"}),
)
# The last part of keys that hold a path.
PATHS = frozenset(
    ("run_dir", "output_root", "resume", "out", "run", "chart", "json", "weights_dir", "cache_dir", "path", "tokenizer")
) | {"teacher", "rollouts", "template", "python"}
ONE, SEVERAL = "run", "runs"  # keys of a command that take words which are no KEY=VALUE


def with_command(
    arguments: Sequence[str], commands: Collection[str], keys_of: Callable[[str], Collection[str]]
) -> list[str]:
    """``parity seed=1`` -> ``command=parity seed=1``; ``compare a b`` -> ``command=compare command.runs=["a","b"]``.

    A line without a command's name is one of ``train``. ``model.path`` chooses ``model=local`` where nothing else is.

    Args:
        arguments: of the program.
        commands: names there are.
        keys_of: command -> its keys.

    Raises:
        ConfigError: the first word is neither a command, an option nor KEY=VALUE; or the command takes no such words.
    """
    first, *rest = [*arguments] or [""]
    if not first.replace("_", "").replace("-", "").isalpha() or first.startswith("-"):
        return _with_implied(arguments, IMPLIED)
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
    return [f"command={first}", *_with_implied(settings, IMPLIED_ABOUT_A_POLICY if ONE in keys else IMPLIED)]


def with_open_mappings(arguments: Sequence[str]) -> list[str]:
    """Let keys of open mappings be set as any other: Hydra itself wants ``++`` before a key it does not know."""
    return [f"++{word}" if _reaches_into_open_mapping(word) else word for word in arguments]


def with_home(arguments: Sequence[str]) -> list[str]:
    """``KEY=~/x`` in the home of who types it, where the key holds a path.

    Shells do so for some keys, for all or for none; nobody wants a folder called ``~``.
    """
    return [_with_home(word) for word in arguments]


def _with_home(word: str) -> str:
    key, equals, value = word.partition("=")
    is_path = equals and value.startswith("~/") and key.rpartition(".")[2].lstrip("+") in PATHS
    return f"{key}={os.path.expanduser(value)}" if is_path else word


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


def _with_implied(words: Sequence[str], rules: Sequence[tuple[str, str, set[str]]]) -> list[str]:
    """The settings, with the choices that they imply where none is made and no run gives them; behind options."""
    keys = {word.partition("=")[0].lstrip("+") for word in words if not word.startswith("-")}
    if keys & {f"command.{ONE}", "experiment"}:
        return list(words)
    implied = [choice for key, choice, chosen in rules if key in keys and not keys & chosen]
    place = min((number for number, word in enumerate(words) if not word.startswith("-") and "=" in word), default=0)
    return [*words[:place], *implied, *words[place:]]


def _reaches_into_open_mapping(word: str) -> bool:
    key, equals, value = word.partition("=")
    if not equals or key.startswith(("+", "~", "-")):
        return False
    return key.startswith(tuple(f"{name}." for name in OPEN_MAPPINGS)) or (
        key in OPEN_MAPPINGS and value.startswith("{")
    )
