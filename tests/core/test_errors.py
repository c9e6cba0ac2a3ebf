"""Errors for users say key, value, reason and remedy in one line; the tree tells them from our own bugs."""

import pytest

from rlmodule.core import errors
from rlmodule.core.errors import ConfigError, DataError, DependencyError, RLModuleError, did_you_mean, in_one_line


def test_the_tree_is_the_one_drawn_at_the_top_of_the_file():
    drawn = {line.split()[1] for line in errors.__doc__.splitlines() if line.strip().startswith("+--")}
    made = {cls.__name__ for cls in RLModuleError.__subclasses__() if cls.__module__ == errors.__name__}
    assert made == drawn
    assert not issubclass(AssertionError, RLModuleError)


def test_a_config_error_reads_key_value_reason_fix():
    error = ConfigError(key="a.b", got=3, because="it is odd", fix="Use a.b=4")
    assert str(error) == "a.b=3: it is odd. Use a.b=4"
    assert (error.key, error.got, error.because, error.fix) == ("a.b", 3, "it is odd", "Use a.b=4")


def test_a_data_error_reads_place_reason_fix():
    assert (
        str(DataError(location="rows.jsonl:3", because="no prompt", fix="Delete it"))
        == "rows.jsonl:3: no prompt. Delete it"
    )


def test_a_missing_package_comes_with_the_command_that_installs_it():
    error = DependencyError(package="deepspeed", needed_by="strategy=deepspeed", extra="deepspeed")
    assert "pip install 'rlmodule[deepspeed]'" in str(error)
    assert "strategy=deepspeed needs the package 'deepspeed'" in str(error)


@pytest.mark.parametrize(
    ("word", "known", "sentence"),
    [
        ("ppo_clib", ["sft", "ppo_clip"], "Did you mean ppo_clip? Known: ppo_clip, sft"),
        ("zzz", ["b", "a"], "Known: a, b"),
        ("zzz", [], ""),
        ("lr", ["lrs", *(f"k{i}" for i in range(20))], "Did you mean lrs?"),  # a long list would bury the answer
    ],
)
def test_did_you_mean(word, known, sentence):
    assert did_you_mean(word, known) == sentence


def test_a_word_like_nothing_known_is_told_all_that_is():
    names = [f"name{i}" for i in range(30)]
    assert all(name in did_you_mean("qq", names) for name in names)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left"), "OSError: [Errno 28] No space left"),
        (RuntimeError("shape [2]\nframe #0"), "RuntimeError: shape [2]"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_error_in_one_line_has_its_type_and_its_first_line(error, line):
    assert in_one_line(error) == line
