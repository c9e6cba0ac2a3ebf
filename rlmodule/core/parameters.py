"""Parameters of a module by all of their names; a tied parameter has several."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def tied(model: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Parameter]]:
    """Yield (all names, parameter) of each distinct parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return ((tuple(n), p) for p, n in names.items())


def put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set the parameter of that name only, not the others it is tied to."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = parameter
