"""How the ranks of a run are started, one file per launcher: the file's name is the launcher's name.

Leaves out ranks that torchrun, srun or a cluster's operator starts: those find their place by themselves
(``parts/place.py``), and no launcher takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from rlmodule.core.registry import Registry
from rlmodule.run.launchers.parts.waiting import WaitingRank


@dataclass(frozen=True)
class Job:
    """What is to be started.

    Args:
        program: arguments of the interpreter that start this package.
        run_dir: of the run; its configuration is there already, and every machine sees it.
        num_processes: ranks on each machine.
        num_nodes: machines.
        device: kind of device that each rank needs one of: cpu, cuda, ...
        timeout: seconds that a rank may be silent before it counts as frozen.
        waiting: ranks that ``Launcher.ready`` has made, if any.
    """

    program: Sequence[str]
    run_dir: Path
    num_processes: int
    num_nodes: int = 1
    device: str = "cpu"
    timeout: float = 600.0
    waiting: Sequence[WaitingRank] = ()

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_processes * self.num_nodes


class Launcher(Protocol):
    """A way of starting ranks: a frozen dataclass whose fields are its config keys, ``launcher.*``.

    ``reaches_other_machines``: whether it starts ranks elsewhere than beside this process.
    """

    reaches_other_machines: ClassVar[bool]

    def check(self) -> None:
        """Refuse, before anything is loaded, a run that this launcher cannot start.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """

    def ready(self, num_processes: int, device: str, main: Callable[[Sequence[str]], int]) -> Sequence[WaitingRank]:
        """Ranks that wait beside this process while it checks the run; none where that is not to be had.

        Args:
            num_processes: of each machine.
            device: kind of device of each.
            main: what ``python PROGRAM`` does with its arguments.
        """

    def __call__(self, job: Job) -> int:
        """Run ``python PROGRAM --worker RUN_DIR`` as the ranks of a job, watch them, and leave none of them behind.

        Returns:
            The exit code of the rank that failed first by itself, or 0.

        Raises:
            TrainingError: a rank died of a signal or froze; the message names it.
        """


LAUNCHERS: Registry[Launcher] = Registry("launcher", "rlmodule.run.launchers")
