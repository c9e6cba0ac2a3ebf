"""Errors that are written for users: printed without a traceback, exit code 2.

    RLModuleError
    +-- ConfigError        a configuration key has an invalid value
    +-- DataError          a row of a file cannot be used
    +-- CheckpointError    the requested checkpoint is damaged or missing
    +-- DependencyError    an optional package is not installed
    +-- TrainingError      the run cannot continue (too many skipped steps, all rewards failed, a process died)
    |   +-- EnginesGoneError  no rollout server is left; what was trained is saved first
    +-- Preempted          the run was asked to stop and has saved its state (exit code 75)

Bugs raise AssertionError or any other exception and keep their traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class RLModuleError(Exception):
    """Base class of all errors written for the user."""


class ConfigError(RLModuleError):
    """A configuration key has an invalid value.

    Args:
        key: full dotted key as typed on the command line, e.g. ``batching.max_token_len_per_gpu``.
        got: the invalid value.
        because: why it is invalid.
        fix: what to type instead.
    """

    def __init__(self, *, key: str, got: object, because: str, fix: str) -> None:
        self.key, self.got, self.because, self.fix = key, got, because, fix
        super().__init__(f"{key}={got}: {because}. {fix}")


class DataError(RLModuleError):
    """A row of a data file that cannot be used.

    Args:
        location: ``file:line`` or ``file:row`` (one-based), or a file.
        because: what is wrong with it, with the value.
        fix: what to do about it.
    """

    def __init__(self, *, location: str | Path, because: str, fix: str) -> None:
        self.location, self.because, self.fix = str(location), because, fix
        super().__init__(f"{location}: {because}. {fix}")


class CheckpointError(RLModuleError):
    """A checkpoint is missing, incomplete or damaged."""


class DependencyError(RLModuleError):
    """An optional package that a chosen component needs is not installed.

    Args:
        package: as pip knows it.
        needed_by: the setting that chose the component.
        extra: of this project, which brings the package; empty where none does.
        then: a command to run after that, for a package whose own requirements contradict this project's.
    """

    def __init__(self, *, package: str, needed_by: str, extra: str = "", then: str = "") -> None:
        first = f"pip install 'rlmodule[{extra}]'" if extra else ""
        install = " && ".join(command for command in (first, then) if command)
        super().__init__(f"{needed_by} needs the package '{package}'. Install it with: {install}")


class TrainingError(RLModuleError):
    """The run cannot continue because of the data, the settings or the machine."""


class EnginesGoneError(TrainingError):
    """No rollout server is left to draw responses; the policy is whole, and the run can go on later."""


class Preempted(RLModuleError):  # noqa: N818  not an error
    """The run was asked to stop and has saved its state; exit code 75, which schedulers distinguish from errors."""


def in_one_line(error: BaseException) -> str:
    """The error's type and the first line of what it says, for a sentence that gives it as the reason."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")


_SHORT_LIST = 12  # names that still read as one line


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Sentence with the nearest known words, and all known words if they are few; empty if there are none."""
    names = sorted(known)
    near = nearest(word, names)
    parts = [near] if near else []
    if names and (len(names) <= _SHORT_LIST or not near):
        parts.append(f"Known: {', '.join(names)}")
    return " ".join(parts)


def nearest(word: str, known: Iterable[str]) -> str:
    """Question that names the nearest known words; empty where none is near."""
    near = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.54)  # half the letters can be alike by chance
    return f"Did you mean {' or '.join(near)}?" if near else ""
