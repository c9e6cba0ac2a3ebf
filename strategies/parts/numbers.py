"""Numbers of a model's parameters, taken out before another project cuts the model, and given back as it was cut.

So a process never holds more than one whole tensor beside its share of those that come from disk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlmodule.core.parameters import put, tied
from strategies.parts.loading import check_finite

Numbers = dict[tuple[str, ...], Tensor | None]  # all names of a parameter -> its numbers, None where they are on disk


def take_numbers(model: nn.Module) -> Numbers:
    """Move every parameter to the meta device; ties stay."""
    numbers: Numbers = {}
    for names, parameter in list(tied(model)):
        numbers[names] = None if parameter.is_meta else parameter.detach()
        on_meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for name in names:
            put(model, name, on_meta)
    return numbers


def give_numbers(model: nn.Module, numbers: Numbers, device: torch.device) -> None:
    """Fill the parameters, one whole tensor at a time, each as it is cut by now.

    Raises:
        TrainingError: on every process, a weight is NaN or infinite.
    """
    places = dict(model.named_parameters(remove_duplicate=False))
    stored: Any = model.stored
    for names, kept in numbers.items():
        cut = places[names[0]]
        assert all(places[name] is cut for name in names), f"{names} are no longer one tensor"
        found = stored.read(names[0]) if kept is None else kept
        whole = torch.empty(cut.shape, dtype=cut.dtype, device=device).copy_(found)
        check_finite(stored.where(names[0]) if kept is None else names[0], whole)
        piece = whole
        if isinstance(cut, DTensor):
            piece = distribute_tensor(whole, cut.device_mesh, cut.placements, src_data_rank=None)
        filled = nn.Parameter(piece, cut.requires_grad)
        for name in names:
            put(model, name, filled)
