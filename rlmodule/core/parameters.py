"""Parameters of a module by all of their names (some are tied, one tensor in several places); which stay in float32.

And the states that an optimizer keeps for each, before its first step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DISPATCHED = "ep_dispatch_experts"  # in a plan of transformers: tokens are sent to the experts of this module


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


STATE_NAMES = "state_names"  # key of a parameter group: names of the states that its optimizer keeps, if not Adam's
ADAM_STATES = ("step", "exp_avg", "exp_avg_sq")
EIGHT_BIT_FROM = "eight_bit_from"  # key of a parameter group: elements from which on Adam's moments have 8 bits
BLOCK = 256  # elements that share a scale


def empty_states(group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
    """The states of a parameter of an optimizer's group before the first step: zeros.

    Moments of 8 bits, ``<name>_8bit``, have a scale for each block of consecutive elements, ``<name>_scale``.
    """
    whole, device = parameter.detach(), parameter.device
    states = {
        name: torch.zeros((), dtype=torch.float32, device=device) if name == "step" else torch.zeros_like(whole)
        for name in group.get(STATE_NAMES, ADAM_STATES)
    }
    if whole.numel() < group.get(EIGHT_BIT_FROM, math.inf):
        return states
    for name in ADAM_STATES[1:]:
        del states[name]
        states[f"{name}_8bit"] = torch.zeros_like(whole, dtype=torch.uint8)
        states[f"{name}_scale"] = torch.zeros(-(-whole.numel() // BLOCK), dtype=torch.float32, device=device)
    return states


def fp32_names(model: nn.Module, *, strict: bool = False) -> re.Pattern[str]:
    """What is searched for in the name of a tensor: where it is found, the family wants that tensor in float32 always.

    transformers models list such parts (routers of experts, their correction biases): those of
    ``_keep_in_fp32_modules_strict`` for half precision of any kind, those of ``_keep_in_fp32_modules`` for float16,
    where bfloat16 would do.

    Args:
        model: a transformers model, or one that has it at ``lm``.
        strict: leave the second list out.
    """
    lm: Any = model._modules.get("lm", model)
    always, in_half = ({*(getattr(lm, f"_keep_in_fp32_modules{kind}", None) or ())} for kind in ("_strict", ""))
    patterns = always if strict else always | in_half
    # Stars as transformers reads them; without any pattern nothing is found.
    return re.compile("|".join(sorted(pattern.replace("*", ".*") for pattern in patterns)) or r"(?!)")


def fp32_modules(model: nn.Module, names: re.Pattern[str], prefix: str = "") -> Iterator[nn.Module]:
    """The outermost modules below ``model`` all of whose parameters are among ``names``."""
    for name, child in model.named_children():
        parameters = [f"{prefix}{name}.{key}" for key, _ in child.named_parameters()]
        if parameters and all(names.search(key) for key in parameters):
            yield child
        else:
            yield from fp32_modules(child, names, f"{prefix}{name}.")


def linear_weights(model: nn.Module) -> frozenset[str]:
    """All names of the tensors that ``nn.Linear`` alone reads, so that autocast casts them whenever they are read.

    Those tied to a tensor of another kind of module (an embedding) are not among them, nor are those of layers with a
    forward of their own.
    """
    read_by: dict[int, bool] = {}  # id of a parameter -> whether each of its readers casts it
    names: dict[str, int] = {}
    for prefix, module in model.named_modules():
        casts = type(module) is nn.Linear and "forward" not in vars(module)
        for leaf, parameter in module.named_parameters(prefix, recurse=False):
            names[leaf] = id(parameter)
            read_by[id(parameter)] = casts and read_by.get(id(parameter), True)
    return frozenset(name for name, parameter in names.items() if read_by[parameter])


def is_adapter(name: str) -> bool:
    """Whether a module, or a tensor, belongs to an adapter, which peft's names tell; scoring may leave adapters out."""
    return ".lora_" in f".{name}"


@dataclass(frozen=True)
class Cast:
    """Turns floating-point tensors into ``dtype`` (None leaves them); those with a name in ``fp32`` into float32."""

    dtype: torch.dtype | None
    fp32: re.Pattern[str]

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(torch.float32 if self.fp32.search(name) else self.dtype)
