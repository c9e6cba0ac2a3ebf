"""Parameters that a backend fuses and cuts, as pieces with Hugging Face names: for loading, export and checkpoints.

Leaves out which pieces a parameter has (the model of the backend says so) and who gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def unchanged(tensor: Tensor) -> Tensor:
    """The view of a parameter that is one piece."""
    return tensor


@dataclass(frozen=True)
class Piece:
    """A part of a parameter that the Hugging Face model has under a name of its own.

    Args:
        names: there; several where it is tied.
        dim: along which ranks cut it, None where each has all of it.
        view: takes a tensor with the shape of the parameter and returns a view of this part of it, whose first
            dimensions may be split in several.
    """

    names: tuple[str, ...]
    dim: int | None = None
    view: Callable[[Tensor], Tensor] = unchanged

    def of(self, tensor: Tensor) -> Tensor:
        """The part, in the shape it has in the Hugging Face model, but for what other ranks have of it."""
        part = self.view(tensor)
        return part.flatten(0, part.ndim - tensor.ndim).contiguous()

    def put(self, tensor: Tensor, part: Tensor) -> None:
        """Write the part, unless it is that very memory (``of`` copies only what is not in one place)."""
        target = self.view(tensor)
        if part.data_ptr() != target.data_ptr():
            target.copy_(part.view(target.shape))

    def cut(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What rank ``rank`` of ``size`` has of the whole tensor."""
        return whole if self.dim is None else whole.chunk(size, self.dim)[rank]


Pieces = tuple[nn.Parameter, tuple[Piece, ...]]  # a parameter and all of its pieces


@torch.no_grad()
def fill(parameters: Iterable[Pieces], read: Callable[[str], Tensor], rank: int, size: int) -> None:
    """Give every parameter its numbers, reading one whole tensor at a time."""
    for parameter, pieces in parameters:
        for piece in pieces:
            piece.put(parameter.data, piece.cut(read(piece.names[0]), rank, size).contiguous())
