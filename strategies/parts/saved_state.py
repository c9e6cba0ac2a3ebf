"""Models and optimizers in a checkpoint: every process writes and reads what it holds, by names that know no strategy.

Lightning keeps loops, schedules, callbacks and data; that state becomes JSON and a few tensors. Models and optimizers
go into ``shards/`` beside it, in pieces that any reader can cut anew, so a run may go on with another number of
processes and another strategy. Nothing is pickled: a stranger's checkpoint runs no code when it is read. Leaves out the
files (``shards.py``, ``snapshot.py``) and how a folder is written safely (``checkpoint/state.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlmodule.core.contract import SaveLater
from rlmodule.core.errors import CheckpointError, in_one_line
from rlmodule.core.parameters import ADAM_STATES, EIGHT_BIT_FROM, STATE_NAMES
from strategies.parts.failures import on_all_or_none
from strategies.parts.shards import Index, digests, plan_of_rank, read_index, read_shards
from strategies.parts.snapshot import SHARDS, RankReport, SavedSnapshot, StateFiles, agree

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
        """The tensors of ``state_dict_to_save``, to be filled; those of the optimizer too, before its first step."""

    @abstractmethod
    def load_state_dict(self, name: str, optimizer: Optimizer, parts: Mapping[str, Tensor]) -> None:
        """Take over tensors that have been filled."""

    @abstractmethod
    def all_on_device(self, *, changes: bool) -> AbstractContextManager[None]:
        """Context with models and optimizer states on the device; ``changes`` says that they are written to."""

    def snapshot(self, state: Mapping[str, Any], *, copied: bool) -> SavedSnapshot:
        """Take this process's part of a checkpoint; every process calls it.

        Args:
            state: what Lightning keeps.
            copied: into host memory of its own, so that training may go on before it is written.
        """
        parts: dict[str, Tensor] = {}
        files = StateFiles()
        try:
            parts, mine = self._take_parts(copied=copied)
            if not dist.is_initialized() or dist.get_rank() == 0:
                files = StateFiles.of(state)
        except Exception as error:  # every process must reach the exchange
            mine = RankReport(failure=in_one_line(error))
        if copied and self._writers is None and dist.is_initialized():
            self._writers = dist.new_group(backend="gloo")
        return SavedSnapshot(
            parts,
            agree(mine),
            files,
            group=self._writers if copied else None,
            on_device=nullcontext if copied else partial(self.all_on_device, changes=False),
        )

    def _take_parts(self, *, copied: bool) -> tuple[dict[str, Tensor], RankReport]:
        parts: dict[str, Tensor] = {}
        with self.all_on_device(changes=False):
            for name, optimizer in self.models_and_optimizers():
                parts |= self.state_dict_to_save(name, optimizer)
            not_finite = first_not_finite(parts)
            if copied:
                parts = {key: tensor.to("cpu", copy=True) for key, tensor in parts.items()}
            plan = plan_of_rank(parts)
            return parts, RankReport(plan, not_finite, digests=digests(parts, plan))

    def load_shards(self, folder: Path) -> None:
        """Read what this process holds from ``folder``; every process calls it.

        Raises:
            CheckpointError: on every process, when the checkpoint is of another model or one cannot read its part.
        """
        with self.all_on_device(changes=True):
            for name, optimizer in self.models_and_optimizers():
                wanted = self.state_dict_to_load(name, optimizer)
                found = on_all_or_none(partial(read_parts, folder, wanted))
                self.load_state_dict(name, optimizer, found)
                if not any(MOMENT in key for key in found):  # saved before the first optimizer step
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
        """Settings of the groups, which say what states there are; a snapshot holds the moments."""
        return {"param_groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing yet: models are read together with their optimizers."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read models and optimizers; the settings of an optimizer are those of this run, whatever was saved."""
        assert self._saved_at is not None, "Lightning loads a checkpoint before it hands it out"
        self.load_shards(self._saved_at)
        for (name, optimizer), state in zip(self.models_and_optimizers(), checkpoint["optimizer_states"], strict=True):
            check_same_optimizer(self._saved_at, name, optimizer, state["param_groups"])

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's own state; ``load_optimizer_state_dict`` reads the tensors beside it later."""
        self._saved_at = Path(checkpoint_path).parent
        return on_all_or_none(partial(StateFiles.read, Path(checkpoint_path)))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Take a snapshot and write it at once; with ``SaveLater`` the caller gets it, and writes it.

        Raises:
            CheckpointError: on every process, when one could not take its part or holds a weight that is not finite.
        """
        if isinstance(storage_options, SaveLater):
            storage_options.snapshot = self.snapshot(checkpoint, copied=storage_options.copied)
            return
        snapshot = self.snapshot(checkpoint, copied=False)
        if snapshot.failure is not None or snapshot.not_finite is not None:
            raise CheckpointError(
                f"{filepath}: nothing is saved ({snapshot.failure or f'{snapshot.not_finite} is not finite'})"
            )
        on_all_or_none(partial(snapshot.write, Path(filepath)))


def read_parts(
    folder: Path, wanted: Mapping[str, Tensor], *, may_lack: Collection[str] = frozenset()
) -> dict[str, Tensor]:
    """Fill those of ``wanted`` that the checkpoint has, and return them.

    Raises:
        CheckpointError: it lacks a weight that is not among ``may_lack``, is of another model, or cannot be read.
    """
    try:
        index = read_index(folder / SHARDS)
        check_same_model(index, {key: tensor for key, tensor in wanted.items() if key in index or key not in may_lack})
        found = {key: tensor for key, tensor in wanted.items() if key in index}
        read_shards(folder / SHARDS, index, found)
        bad = first_not_finite(found)
        if bad is not None:
            raise ValueError(f"{bad} is not finite")
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except Exception as error:  # whatever a damaged or foreign file leads to
        raise CheckpointError(f"{folder}: the checkpoint cannot be read ({in_one_line(error)})") from error
    return found


def first_not_finite(parts: Mapping[str, Tensor]) -> str | None:
    """Name of a weight that is NaN or infinite, or of a moment that is NaN; of what this process holds.

    An infinite second moment is let pass: a huge gradient leaves one, and the weight then stands still.
    """
    for name, tensor in parts.items():
        piece = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if piece.is_floating_point():
            bad = piece.isnan() if MOMENT in name else ~piece.isfinite()
            if bool(bad.any()):
                return name
    return None


def check_same_model(index: Index, wanted: Mapping[str, Tensor]) -> None:
    """Refuse the weights of another model.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    for name, tensor in wanted.items():
        if name not in index:
            if MOMENT in name:  # there are none before the first optimizer step
                continue
            raise CheckpointError(f"it has no {name}. It was written for another model; start anew, or use its own")
        saved, here = list(index[name].shape), list(tensor.shape)
        if saved != here:
            raise CheckpointError(f"{name} is {saved} there and {here} here. {_remedy(name, saved)}")


def check_same_optimizer(folder: Path, name: str, optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the states of another optimizer, which mean something else here.

    Raises:
        CheckpointError: there are other groups of parameters, or it keeps other states of them.
    """
    if [states_kept(group) for group in optimizer.param_groups] != [states_kept(group) for group in saved]:
        raise CheckpointError(
            f"{folder}: model {name} was trained there with another optimizer, or with other parameters under it. "
            "Resume with the same optimizer= (of adamw8bit with the same eight_bit_from), or start anew"
        )


def states_kept(group: Mapping[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """What an optimizer keeps of each parameter of a group: names, and elements from which on moments have 8 bits."""
    return tuple(group.get(STATE_NAMES, ADAM_STATES)), group.get(EIGHT_BIT_FROM)


def _remedy(name: str, saved: list[int]) -> str:
    if ".lora_A." in name:  # [r, in]
        return f"It was written with model.lora.r={saved[0]}; resume with that, or start anew"
    return "It was written for another model; start anew, or use its own"
