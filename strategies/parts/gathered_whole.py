"""Modules whose weights ZeRO-3 gathers all at once, when the module itself is called.

It gathers the weights of each module when that module is called. A layer that reads weights of modules inside of it
which it never calls, or calls those modules once for each bucket of samples, would find them missing, or have processes
gather in different orders. DeepSpeed calls a module that it does not look into a leaf (``set_z3_leaf_module``): its
gradients are taken when the gradient of its first positional argument is there, so there must be one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN = "hidden_states"  # transformers' name of the first argument of a layer


def gather_whole(model: nn.Module, classes: Collection[str], set_leaf: Callable[[nn.Module, bool], object]) -> None:
    """Gather every module of ``model`` whose class has one of these names as a whole.

    ``set_leaf`` is DeepSpeed's ``set_z3_leaf_module``.
    """
    for module in model.modules():
        if type(module).__name__ in classes:
            set_leaf(module, True)
            module.register_forward_pre_hook(_hidden_first, with_kwargs=True)


def _hidden_first(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hidden states as the first positional argument, with a gradient of their own where nothing before them trains."""
    rest = dict(kwargs)
    hidden, *others = args or (rest.pop(HIDDEN),)
    assert isinstance(hidden, Tensor), f"{type(module).__name__} is given hidden states first"
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return (hidden, *others), rest
