"""A command's name in front of a line, and keys that are the user's own."""

# Shared cases: T2B-29.

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from rlmodule.cli import CONF
from rlmodule.commands.parts.arguments import OPEN_MAPPINGS, with_command, with_home, with_open_mappings
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
        (["train", "model.path=m"], ["command=train", "model=local", "model.path=m"]),
        (["seed=1", "model.path=m"], ["model=local", "seed=1", "model.path=m"]),
        (["-m", "model.path=m,n"], ["-m", "model=local", "model.path=m,n"]),
        (["--cfg", "job", "model.path=m"], ["--cfg", "job", "model=local", "model.path=m"]),
        (["model=qwen7b", "model.path=m"], ["model=qwen7b", "model.path=m"]),
        (["experiment=mine", "model.path=m"], ["experiment=mine", "model.path=m"]),
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
        ("environment.arguments={size: 512}", "++environment.arguments={size: 512}"),
        ("environment.settings.min_terms=2", "++environment.settings.min_terms=2"),
        ("~model.architecture.head_dim", "~model.architecture.head_dim"),
        ("data.shuffle=false", "data.shuffle=false"),
        ("model.architecture=5", "model.architecture=5"),
    ],
)
def test_t2b_29_keys_of_open_mappings_are_set_like_any_other(word: str, read: str) -> None:
    assert with_open_mappings([word]) == [read]


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("run_dir=~/runs/a", "run_dir=/home/me/runs/a"),
        ("++model.path=~/m", "++model.path=/home/me/m"),
        ("command.out=~/a.jsonl", "command.out=/home/me/a.jsonl"),
        ("data.train_files=[~/a.jsonl]", "data.train_files=[~/a.jsonl]"),  # read so by itself
        ("data.system_prompt=~/x", "data.system_prompt=~/x"),
        ("~logger.csv", "~logger.csv"),
        ("run_dir=a~/b", "run_dir=a~/b"),
    ],
)
def test_a_home_stands_for_the_home_in_a_path(monkeypatch: pytest.MonkeyPatch, word: str, read: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert with_home([word]) == [read]


def test_every_mapping_that_is_empty_by_default_is_open() -> None:
    """Hydra takes no key that a file does not have; sections of loggers have keys, or none."""
    empty = {
        f"{path.parent.name}.{key}"
        for path in CONF.glob("*/*.yaml")
        for key, value in OmegaConf.to_container(OmegaConf.load(path)).items()
        if value == {} and path.parent.name != "logger"
    }
    assert {"environment.arguments", "data.turn_marks"} <= empty
    assert empty - set(OPEN_MAPPINGS) == {"reward.weights"}, "a sum has a weight for each of its parts"
