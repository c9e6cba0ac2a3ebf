"""Models and optimizers in a checkpoint: every process writes and reads what it holds, by names that know no strategy.

Lightning keeps loops, schedules, callbacks and data in its own state file; the tensors go into ``shards/`` beside it,
in the format of torch.distributed.checkpoint, which cuts them anew for whoever reads. So a run may go on with another
number of processes, and with another strategy. Leaves out how a folder is written safely (``checkpoint/state.py``).
"""

from __future__ import annotations

import io
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from rlmodule.core.contract import SaveLater
from rlmodule.core.errors import CheckpointError

SHARDS = "shards"
MOMENT = "@"  # NAME@MOMENT is optimizer state of parameter NAME


class SavedState:
    """Lightning's hooks for saving and loading, over the parts a strategy names."""

    _saved_at: Path | None = None
    _writers: dist.ProcessGroup | None = None  # of the threads that write, made for the first of them

    @abstractmethod
    def models_and_optimizers(self) -> list[tuple[str, Optimizer]]:
        """Trainable models, each with its optimizer."""

    @abstractmethod
    def state_dict_to_save(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """What this process holds of a model and its optimizer."""

    @abstractmethod
    def state_dict_to_load(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """The same, to be filled."""

    @abstractmethod
    def load_state_dict(self, name: str, optimizer: Optimizer, parts: Mapping[str, Tensor]) -> None:
        """Take over parts that have been filled."""

    @abstractmethod
    def all_on_device(self, *, changes: bool) -> AbstractContextManager[None]:
        """Models and optimizer states are where they can be read inside, and written where that is said."""

    def snapshot(self, state: Mapping[str, Any], *, copied: bool) -> SavedSnapshot:
        """What this process holds, ready to be written; every process calls it.

        Args:
            state: what Lightning keeps.
            copied: into host memory of its own, so that training may go on before it is written.
        """
        silence_single_process_warning()
        parts: dict[str, Tensor] = {}
        with self.all_on_device(changes=False):
            for name, optimizer in self.models_and_optimizers():
                parts |= self.state_dict_to_save(name, optimizer)
            if not copied:
                return SavedSnapshot(parts, pickled(state), on_device=partial(self.all_on_device, changes=False))
            parts = {key: tensor.to("cpu", copy=True) for key, tensor in parts.items()}
        if self._writers is None and dist.is_initialized():
            self._writers = dist.new_group(backend="gloo")
        return SavedSnapshot(parts, pickled(state), self._writers)

    def load_shards(self, folder: Path) -> None:
        """Read what this process holds from ``folder``; every process calls it.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        silence_single_process_warning()
        with self.all_on_device(changes=True):
            self._load(folder)

    def _load(self, folder: Path) -> None:
        place = folder / SHARDS
        known = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
        for name, optimizer in self.models_and_optimizers():
            wanted = self.state_dict_to_load(name, optimizer)
            missing = [key for key in wanted if key not in known]
            missing_keys = [key for key in missing if MOMENT not in key]
            if missing_keys:
                raise CheckpointError(
                    f"{folder}: it has no {missing_keys[0]}. It was written for another model; start anew, or use "
                    "its own"
                )
            found = {key: tensor for key, tensor in wanted.items() if key in known}
            dcp.load(found, checkpoint_id=place, no_dist=not dist.is_initialized())
            self.load_state_dict(name, optimizer, found)
            if missing:  # saved before the first optimizer step
                optimizer.state.clear()

    # ---- Lightning's hooks

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Tensors are read into what ``shard`` has left on this process."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: a snapshot holds the models."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Settings of the groups, learning rate included; a snapshot holds the moments."""
        return {"param_groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing yet: models are read together with their optimizers."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read models and optimizers."""
        assert self._saved_at is not None, "Lightning loads a checkpoint before it hands it out"
        self.load_shards(self._saved_at)
        for (_, optimizer), state in zip(self.models_and_optimizers(), checkpoint["optimizer_states"], strict=True):
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update(saved)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's own state; keeps in mind where the tensors are."""
        self._saved_at = Path(checkpoint_path).parent
        return torch.load(checkpoint_path, map_location="cpu", weights_only=weights_only is not False)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A snapshot, written at once, or handed to whoever asked for it by ``SaveLater``."""
        if isinstance(storage_options, SaveLater):
            storage_options.snapshot = self.snapshot(checkpoint, copied=storage_options.copied)
        else:
            self.snapshot(checkpoint, copied=False).write(Path(filepath))


@dataclass(frozen=True)
class SavedSnapshot:
    """This process's part of a checkpoint.

    Args:
        parts: tensors by names that know no strategy.
        state: Lightning's own, pickled; the first process writes it.
        group: of the threads that write, apart from the exchanges of training; None for the world, in training's turn.
        on_device: the tensors can be read inside of it.
    """

    parts: Mapping[str, Tensor]
    state: bytes
    group: dist.ProcessGroup | None = None
    on_device: Callable[[], AbstractContextManager[None]] = nullcontext

    def write(self, path: Path) -> None:
        """Tensors into ``shards/`` beside ``path``, the state into it.

        Raises:
            OSError: on every process when one could not write its tensors; on the first when it could not write
                the state.
        """
        try:
            with self.on_device():
                dcp.save(
                    dict(self.parts),
                    checkpoint_id=path.parent / SHARDS,
                    process_group=self.group,
                    no_dist=not dist.is_initialized(),
                )
        except CheckpointException as error:  # no Exception, and it says more than anybody wants to read
            failed = next(iter(error.failures.values()))
            raise OSError(str(failed[0] if isinstance(failed, tuple) else failed)) from None
        if not dist.is_initialized() or dist.get_rank() == 0:
            path.write_bytes(self.state)

    def gather_first_error(self, problem: str | None) -> str | None:
        """The first problem that any process has, on every process."""
        return first_error(problem, self.group)


def first_error(problem: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """The first problem that any process of the group has, on every process of it; one exchange."""
    if not dist.is_initialized():
        return problem
    everyone: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, problem, group=group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None), None)


def pickled(state: Mapping[str, Any]) -> bytes:
    """As ``torch.load`` reads it."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def silence_single_process_warning() -> None:
    """torch.distributed.checkpoint warns of a process without a group, also when it is told that there is none.

    For good: a thread may save, and what ``warnings.catch_warnings`` puts back belongs to all of them.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
