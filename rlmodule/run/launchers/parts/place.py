"""Which rank this process is, and who said so: a launcher of this package, torchrun, srun, or a cluster's operator.

All of them speak through environment variables. An operator such as Kubeflow's sets RANK, WORLD_SIZE and MASTER_*
alone; which machine that is, and which process of the machine, follows from the processes of each
(``trainer.devices``), since the ranks of one machine are numbered next to each other. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rlmodule.core.errors import ConfigError

SUPERVISOR = "RLMODULE_SUPERVISOR"  # id of the process that started this rank and watches it
STORE = "RLMODULE_STORE"  # the file through which the ranks of one machine meet; others meet at MASTER_ADDR
HEARTBEATS = "RLMODULE_HEARTBEATS"  # the folder of the signs of life of a machine's ranks
TORCH = ("RANK", "WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS")
# What else may say where the rank is: its number on its machine, and its machine's.
LOCAL = {"RANK": ("LOCAL_RANK", ("NODE_RANK", "GROUP_RANK")), "SLURM_PROCID": ("SLURM_LOCALID", ("SLURM_NODEID",))}


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process is among those of its run.

    Args:
        rank: of all.
        world_size: how many there are.
        local_rank: on its machine.
        node_rank: of its machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0

    @classmethod
    def of_rank(cls, rank: int, num_processes: int, num_nodes: int) -> ProcessPlace:
        """The place of a rank where every machine has ``num_processes`` of them."""
        node_rank, local_rank = divmod(rank, num_processes)
        return cls(rank, num_processes * num_nodes, local_rank, node_rank)

    def variables(self, supervisor: int) -> dict[str, str]:
        """What a launcher tells the rank; ``supervisor`` is the process that watches it."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "NODE_RANK": str(self.node_rank),
            SUPERVISOR: str(supervisor),
        }


def started_by_launcher() -> bool:
    """Whether a launcher of this package started this process as a rank."""
    return SUPERVISOR in os.environ


def launched_from_outside() -> bool:
    """Whether torchrun, srun or a cluster's operator started this process as one of several."""
    if started_by_launcher():
        return False
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    if os.environ.keys() >= set(TORCH):
        return [os.environ[name] for name in TORCH] != ["0", "1"]  # the only one is a process alone
    return _number("SLURM_NTASKS", 1) > 1 and {"SLURM_PROCID", "SLURM_STEP_ID"} <= os.environ.keys()


def outside_rank() -> int:
    """This process's rank as torchrun, srun or an operator gave it; 0 without them."""
    return _number(_names()[0], 0) if launched_from_outside() else 0


def process_rank() -> int:
    """This process's rank in the run, as who started it said; 0 for a process alone."""
    return _number("RANK", 0) if started_by_launcher() else outside_rank()


def place_of_process(num_processes: int, num_nodes: int) -> ProcessPlace:
    """Where this process is; its environment says it, and must not contradict itself or the configuration.

    Args:
        num_processes: of each machine (``trainer.devices``).
        num_nodes: machines.

    Raises:
        ConfigError: names the variable that is missing, or that contradicts another or the configuration.
    """
    if not (started_by_launcher() or launched_from_outside()):
        _check_alone()
        return ProcessPlace()
    rank, world_size = (_whole(name) for name in _names())
    if world_size != num_processes * num_nodes:
        raise ConfigError(
            key="trainer.devices",
            got=num_processes,
            because=f"{_names()[1]}={world_size} processes were started from outside, by torchrun, srun or a cluster, "
            f"and trainer.devices x trainer.num_nodes is {num_processes * num_nodes}",
            fix="Set trainer.devices to the processes of one machine and trainer.num_nodes to the machines",
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            key=_names()[0],
            got=rank,
            because=f"{world_size} processes are numbered from 0 to {world_size - 1}",
            fix=f"Check what sets {' and '.join(_names())} for this process",
        )
    place = ProcessPlace.of_rank(rank, num_processes, num_nodes)
    _check_named_places(place, num_processes)
    return place


def check_meeting_point() -> None:
    """Check that processes that find each other by MASTER_ADDR and MASTER_PORT have been told both.

    Raises:
        ConfigError: one is missing, or the port is no number.
    """
    for name, what in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port of rank 0's host")):
        if not os.environ.get(name):
            raise ConfigError(
                key=name,
                got=os.environ.get(name, "(not set)"),
                because=f"RANK and WORLD_SIZE make this one of {os.environ.get('WORLD_SIZE')} processes, "
                "which meet there",
                fix=f"Set it to {what} for every process, or start them with torchrun",
            )
    _whole("MASTER_PORT")


def _names() -> tuple[str, str]:
    """The variables that hold rank and world size; those of a torchrun inside a SLURM task go before SLURM's."""
    by_torch = started_by_launcher() or "TORCHELASTIC_RUN_ID" in os.environ
    return TORCH if by_torch or os.environ.keys() >= set(TORCH) else SLURM


def _check_named_places(place: ProcessPlace, num_processes: int) -> None:
    local, nodes = LOCAL[_names()[0]]
    node = next((name for name in nodes if name in os.environ), None)
    for name, want in ((local, place.local_rank), (node, place.node_rank)):
        if name is not None and name in os.environ and _whole(name) != want:
            raise ConfigError(
                key=name,
                got=os.environ[name],
                because=f"{_names()[0]}={place.rank} with trainer.devices={num_processes} makes it {want}: the ranks "
                "of a machine are numbered next to each other, as many on each",
                fix="Set trainer.devices to the processes of one machine, and number them machine by machine",
            )


def _check_alone() -> None:
    """Refuse an environment that says half of what makes a process one of several."""
    rank, world_size = (os.environ.get(name) for name in TORCH)
    if rank is not None and world_size is None:
        missing, there = TORCH[1], TORCH[0]
    elif world_size not in (None, "", "1") and rank is None:
        missing, there = TORCH[0], TORCH[1]
    else:
        return
    raise ConfigError(
        key=there,
        got=os.environ[there],
        because=f"it says that this is one of several processes, and {missing} is not set",
        fix=f"Set {', '.join(TORCH)}, MASTER_ADDR and MASTER_PORT for every process, or unset {there}",
    )


def _whole(name: str) -> int:
    """A variable that holds a whole number.

    Raises:
        ConfigError: it does not.
    """
    text = os.environ.get(name, "(not set)")
    if not text.strip().isdigit():
        raise ConfigError(
            key=name, got=text, because="it must be a whole number", fix="Check what sets it for this process"
        )
    return int(text)


def _number(name: str, default: int) -> int:
    """As ``_whole``; what is not a number counts as not set until ``place_of_process`` says so."""
    text = os.environ.get(name, "")
    return int(text) if text.strip().isdigit() else default


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment that does not know of peers."""
    own, others = (SUPERVISOR, STORE, HEARTBEATS), ("MASTER_", "TORCHELASTIC_", "SLURM_")
    names = (*own, *TORCH, "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", *others)
    return {name: value for name, value in environment.items() if not name.startswith(names)}
