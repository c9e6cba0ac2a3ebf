"""The state of a run at one moment, this process's part: taken together with all others, written without them.

One exchange plans who writes which piece, and tells every process what speaks against writing. Leaves out which tensors
there are (``saved_state.py``) and how a folder is written safely (``checkpoint/state.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan

from rlmodule.core.errors import CheckpointError, in_one_line
from rlmodule.core.plain_state import join_state, split_state
from strategies.parts.failures import first_error
from strategies.parts.shards import Index, save_tensors, share_out, write_index, write_shards

SHARDS = "shards"


@dataclass(frozen=True)
class RankReport:
    """What one process tells the first before a checkpoint is written.

    Args:
        plan: the pieces that it could write.
        not_finite: name of a tensor with NaN or infinity in it, or None.
        failure: what kept it from taking its part, or None.
        digests: piece of a tensor -> a number made of its bits.
    """

    plan: SavePlan = field(default_factory=lambda: SavePlan([]))
    not_finite: str | None = None
    failure: str | None = None
    digests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Agreement:
    """What the first process answers.

    Args:
        plan: the pieces that the process is to write.
        index: where everything lies; for the first process, empty elsewhere.
        not_finite, failure: the first of any process, the same on all of them.
        differing: a piece of which two processes hold copies that are not equal, and those processes; or None.
    """

    plan: SavePlan
    index: Index
    not_finite: str | None
    failure: str | None
    differing: str | None


def agree(mine: RankReport) -> Agreement:
    """Who writes which piece, and whether anything speaks against writing; one exchange between all processes."""
    if not dist.is_initialized():
        return _answers([mine])[0]
    is_first = dist.get_rank() == 0
    reports: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, reports if is_first else None)
    answer: list[Any] = [None]
    dist.scatter_object_list(answer, _answers(reports) if is_first else None)
    agreement: Agreement = answer[0]
    return agreement


def _answers(reports: Sequence[RankReport]) -> list[Agreement]:
    """The answer to each process; a plan that cannot be made is a failure like any other."""
    not_finite = next((report.not_finite for report in reports if report.not_finite is not None), None)
    failure = next((f"rank {rank}: {r.failure}" for rank, r in enumerate(reports) if r.failure is not None), None)
    plans: list[SavePlan] = [SavePlan([]) for _ in reports]
    index: Index = {}
    if failure is None:
        try:
            plans, index = share_out([report.plan for report in reports])
        except Exception as error:
            failure = f"rank 0: {in_one_line(error)}"
    differing = first_differing([report.digests for report in reports])
    return [
        Agreement(plan, index if rank == 0 else {}, not_finite, failure, differing) for rank, plan in enumerate(plans)
    ]


def first_differing(digests: Sequence[Mapping[str, int]]) -> str | None:
    """The first piece of which two ranks hold copies with other bits, in words; None where all copies are equal.

    Args:
        digests: of each rank, piece -> digest.
    """
    holders: dict[str, tuple[int, int]] = {}  # piece -> (the first rank that holds it, its digest)
    for rank, of_rank in enumerate(digests):
        for piece, digest in of_rank.items():
            first, expected = holders.setdefault(piece, (rank, digest))
            if digest != expected:
                return f"{piece} is not the same on rank {first} and rank {rank}"
    return None


@dataclass(frozen=True)
class StateFiles:
    """What Lightning keeps of a run, as JSON and a few flat tensors.

    Args:
        document: for the JSON file.
        tensors: dtype -> flat tensor, for the safetensors file beside it.
    """

    document: Any = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StateFiles:
        """A copy of ``state``; raises TypeError where it holds what is neither plain nor a tensor."""
        return cls(*split_state(dict(state)))

    def write(self, path: Path) -> None:
        """Write the JSON to ``path`` and the tensors beside it."""
        path.write_text(json.dumps(self.document, allow_nan=False), encoding="utf-8")
        save_tensors(self.tensors, path.with_suffix(".safetensors"))

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """The state that was written to ``path``.

        Raises:
            CheckpointError: it is missing, damaged or of another format.
        """
        try:
            state = join_state(json.loads(path.read_bytes()), load_file(path.with_suffix(".safetensors")))
            if not isinstance(state, dict):
                raise TypeError(f"the state is of type {type(state).__name__}")
        except Exception as error:  # whatever a damaged or foreign file leads to
            raise CheckpointError(
                f"{path}: the checkpoint cannot be read ({in_one_line(error)}). Use an earlier one"
            ) from error
        return state


@dataclass(frozen=True)
class SavedSnapshot:
    """This process's part of a checkpoint.

    Args:
        parts: tensors by names that know no strategy.
        agreement: what all processes have agreed on.
        state: what Lightning keeps; the first process writes it, and it is empty elsewhere.
        group: of the threads that write, apart from the exchanges of training; None for the world, in training's turn.
        on_device: context in which the tensors can be read.
    """

    parts: Mapping[str, Tensor]
    agreement: Agreement
    state: StateFiles
    group: dist.ProcessGroup | None = None
    on_device: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def failure(self) -> str | None:
        """What kept a process from taking its part; the same on every process."""
        return self.agreement.failure

    @property
    def not_finite(self) -> str | None:
        """Name of a tensor with NaN or infinity in it; the same on every process."""
        return self.agreement.not_finite

    @property
    def differing(self) -> str | None:
        """A tensor of which two processes hold copies that are not equal, in words; the same on every process."""
        return self.agreement.differing

    def write(self, path: Path) -> None:
        """Tensors into ``shards/`` beside ``path``, the state into it; nothing is exchanged with other processes.

        Raises:
            Exception: this process could not write its files.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        folder = path.parent / SHARDS
        with self.on_device():
            write_shards(folder, self.parts, self.agreement.plan, rank)
        if rank == 0:
            write_index(folder, self.agreement.index)
            self.state.write(path)

    def gather_first_error(self, problem: str | None) -> str | None:
        """The first problem that any process has, on every process."""
        return first_error(problem, self.group)
