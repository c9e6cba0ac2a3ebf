"""A command's name in front of a line, and keys that are the user's own."""

# Shared cases: T2B-29.

from __future__ import annotations

import pytest

from rlmodule.commands.parts.arguments import with_command, with_open_mappings
from rlmodule.core.errors import ConfigError

COMMANDS = ("parity", "train")


@pytest.mark.parametrize(
    ("line", "read"),
    [
        (["parity", "seed=1"], ["command=parity", "seed=1"]),
        (["seed=1", "parity"], ["seed=1", "parity"]),
        (["-m", "seed=1,2"], ["-m", "seed=1,2"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_the_first_word_can_name_the_command(line: list[str], read: list[str]) -> None:
    assert with_command(line, COMMANDS) == read


def test_a_word_that_is_no_command_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"command=party: no command has that name.*Did you mean parity"):
        with_command(["party"], COMMANDS)


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("data.chat_template_args.enable_thinking=false", "++data.chat_template_args.enable_thinking=false"),
        ("data.chat_template_args={enable_thinking:false}", "++data.chat_template_args={enable_thinking:false}"),
        ("model.architecture.rope_theta=1e6", "++model.architecture.rope_theta=1e6"),
        ("+reward.arguments.x=1", "+reward.arguments.x=1"),
        ("~model.architecture.head_dim", "~model.architecture.head_dim"),
        ("data.shuffle=false", "data.shuffle=false"),
        ("model.architecture=5", "model.architecture=5"),
    ],
)
def test_t2b_29_keys_of_open_mappings_are_set_like_any_other(word: str, read: str) -> None:
    assert with_open_mappings([word]) == [read]
