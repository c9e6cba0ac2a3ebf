"""Reads weights from disk into a model, one part of it at a time, so that no process ever holds the whole model.

Leaves out the files (the model has them as ``stored``) and how a part is sharded once it is read (a backend's own).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlmodule.core.contract import StoredWeights
from rlmodule.core.errors import TrainingError
from rlmodule.core.parameters import put, tied


def load(model: nn.Module, part: nn.Module, device: torch.device) -> None:
    """Replace the parameters of ``part`` that are on the meta device by their weights, on ``device``.

    The new parameter has the dtype of the old one (fp32, whatever is stored), and for a DTensor its placements.

    Raises:
        TrainingError: on every process, a weight is NaN or infinite.
    """
    waiting = {parameter for parameter in part.parameters() if parameter.is_meta}
    if not waiting:
        for name, parameter in part.named_parameters():
            if not isinstance(parameter, DTensor):  # the parts that are one were checked before they were sharded
                check_finite(name, parameter)
        return
    stored: StoredWeights = model.stored  # type: ignore[assignment]
    for names, parameter in tied(model):
        if parameter in waiting:
            loaded = nn.Parameter(read(stored, names[0], parameter, device), parameter.requires_grad)
            for name in names:
                put(model, name, loaded)


def drop_unread(model: nn.Module) -> None:
    """Replace weights that an error left on the meta device by empty ones, which can be moved as any other."""
    for names, parameter in list(tied(model)):
        if parameter.is_meta:
            for name in names:
                put(model, name, nn.Parameter(torch.empty(0), requires_grad=False))


def read(stored: StoredWeights, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The stored tensor of that name, in the dtype of ``like`` and sharded like it."""

    def take(rows: slice = slice(None)) -> torch.Tensor:
        taken = stored.read(name, rows).to(device=device, dtype=like.dtype, copy=True)
        check_finite(stored.where(name), taken)
        return taken

    if not isinstance(like, DTensor):
        return take()
    mesh = like.device_mesh
    if tuple(like.placements) != (Shard(0),) or like.shape[0] % mesh.size():
        return distribute_tensor(take(), mesh, like.placements, src_data_rank=None)
    # One share after the other: all are looked at, so that every process refuses the same, and one is kept.
    size, mine = like.shape[0] // mesh.size(), None
    for rank in range(mesh.size()):
        share = take(slice(rank * size, (rank + 1) * size))
        mine = share if rank == mesh.get_local_rank() else mine
    assert mine is not None, "this process has a place in the mesh"
    return DTensor.from_local(mine, mesh, like.placements, run_check=False)


def check_finite(where: str, weight: torch.Tensor) -> None:
    """Refuse a weight that no model can start from.

    Args:
        where: the file it comes from, or its name.
        weight: of any shape.

    Raises:
        TrainingError: an element is NaN or infinite.
    """
    if not bool(weight.detach().isfinite().all()):
        raise TrainingError(
            f"{where}: the starting weights hold NaN or infinity, so every answer of this model would. Its files are "
            "damaged, or were written by a run that diverged; take another checkpoint of it"
        )
