"""A command's name in front of a line, and keys that are the user's own."""

# Shared cases: T2B-29.

from __future__ import annotations

import pytest

from rlmodule.commands.parts.arguments import with_command, with_open_mappings
from rlmodule.core.errors import ConfigError

LONG = f"{{text:{'a' * 300}}}"  # a setting longer than any name of a file
COMMANDS = {"parity": {"name", "steps"}, "train": {"name"}, "compare": {"name", "runs"}, "chat": {"name", "run"}}


@pytest.mark.parametrize(
    ("line", "read"),
    [
        (["parity", "seed=1"], ["command=parity", "seed=1"]),
        (["seed=1", "parity"], ["seed=1", "parity"]),
        (["-m", "seed=1,2"], ["-m", "seed=1,2"]),
        (["--help"], ["--help"]),
        ([], []),
        (["compare", "a b", "seed=1", "c,d"], ["command=compare", "seed=1", 'command.runs=["a b","c,d"]']),
        (["chat", "a"], ["command=chat", 'command.run="a"']),
        (["chat", "model.path=m"], ["command=chat", "model=local", "environment=none", "model.path=m"]),
        (
            ["chat", "model=qwen7b", "model.path=m"],
            ["command=chat", "environment=none", "model=qwen7b", "model.path=m"],
        ),
        (
            ["chat", "model.path=m", "data.train_files=[p]"],
            ["command=chat", "model=local", "data=files", "environment=none", "model.path=m", "data.train_files=[p]"],
        ),
        (["chat", "a", "model.path=m"], ["command=chat", "model.path=m", 'command.run="a"']),
        (["train", "model.path=m"], ["command=train", "model.path=m"]),
        (["train", f"reward.arguments={LONG}"], ["command=train", f"reward.arguments={LONG}"]),
    ],
)
def test_the_first_word_can_name_the_command(line: list[str], read: list[str]) -> None:
    assert with_command(line, COMMANDS, COMMANDS.__getitem__) == read


@pytest.mark.parametrize("line", [["parity", "a"], ["train", "a"], ["chat", "a", "b"]])
def test_words_that_a_command_does_not_take_are_refused(line: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"takes (no words|one run), and a setting is written KEY=VALUE"):
        with_command(line, COMMANDS, COMMANDS.__getitem__)


def test_a_word_that_is_no_command_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"command=party: no command has that name.*Did you mean parity"):
        with_command(["party"], COMMANDS, COMMANDS.__getitem__)


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
