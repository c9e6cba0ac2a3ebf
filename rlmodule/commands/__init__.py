"""What can be done with a configuration, one file per command: the file's name is the command's name.

Leaves out the command line itself (``cli.py``) and what a run is (``run/``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from rlmodule.core.registry import Registry

if TYPE_CHECKING:  # a run needs torch, and the list of commands must not wait for it
    from rlmodule.run.run import Run


@dataclass(frozen=True)
class Invocation:
    """How a command was called.

    Args:
        read_run: converts the configuration into a run; nothing of it is built yet. A command that needs no run never
            asks for one.
        settled_config: the resolved configuration of a run, YAML, secrets masked; hands its secrets to the processes
            that this one starts.
        provenance: command line and revision of the code, as text.
        start_ranks: starts a number of processes that each do their part (``RankCommand.on_rank``) of the command whose
            configuration lies in a run directory, and returns the exit code.
        make_starting_weights: makes the starting weights of the run of a directory in a process of its own.
    """

    read_run: Callable[[], Run]
    settled_config: Callable[[Run], str]
    provenance: str
    start_ranks: Callable[[Path, int], int]
    make_starting_weights: Callable[[Path], None]

    @cached_property
    def run(self) -> Run:
        """The configured run.

        Raises:
            ConfigError: the first setting that is wrong, with its full key.
        """
        return self.read_run()


class Command(Protocol):
    """A command: a frozen dataclass whose fields are its config keys, ``command.*``.

    One with the key ``run`` takes the settings of the run in that directory, where there is one; words behind its name
    that are no KEY=VALUE are that key, or the key ``runs`` of a command that has it.

    ``has_run_dir``: whether it writes into a run directory of its own. Without one nothing is made below output_root.
    ``starts_ranks``: whether the ranks of its run, where there are several, do it (``RankCommand``).
    """

    has_run_dir: ClassVar[bool] = True
    starts_ranks: ClassVar[bool] = False

    def __call__(self, invocation: Invocation) -> int:
        """Carry it out; returns the exit code.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """


class RankCommand(Command, Protocol):
    """A command that is carried out by several processes: ``Invocation.start_ranks`` starts them."""

    def on_rank(self, run: Run) -> None:
        """The part of one rank; ``run`` is the one whose configuration lies in the run directory.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """


COMMANDS: Registry[Command] = Registry("command", "rlmodule.commands")
