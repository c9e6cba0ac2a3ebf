"""Parts of a model that compute in float32 whatever the rest does, as its family asks for.

Routers of experts are the usual case: rounded to bfloat16, a large share of tokens goes to other experts
(https://github.com/sgl-project/sglang/issues/37133). Autocast knows nothing of it, and would round them.
Leaves out how such weights are stored and gathered (``strategies/``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlmodule.core.parameters import fp32_modules, fp32_names


def compute_in_fp32(lm: PreTrainedModel) -> None:
    """Take the modules that the family keeps in float32 out of autocast, in place; names of weights stay."""
    for module in fp32_modules(lm, fp32_names(lm)):
        module.forward = _InFloat32(module.forward)


def head_is_fp32(lm: PreTrainedModel) -> bool:
    """Whether the family wants its logits made in float32."""
    head, names = lm.get_output_embeddings(), fp32_names(lm)
    return any(names.search(f"{name}.weight") for name, module in lm.named_modules() if module is head)


class _InFloat32:
    """A forward without autocast, on float32 inputs."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        with torch.autocast(device, enabled=False):
            return self.forward(*map(_float, args), **{name: _float(value) for name, value in kwargs.items()})


def _float(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
