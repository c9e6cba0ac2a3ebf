"""The repeated blocks of a transformer, which sharding treats one by one; and the types weights may travel in.

Some families keep parts of a block in float32 (routers of experts): where weights are gathered in bfloat16, these are
sharded by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlmodule.core.errors import ConfigError
from rlmodule.core.parameters import fp32_modules, fp32_names, is_adapter, linear_weights
from rlmodule.core.sharding import SMALL

DTYPES: Mapping[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}

SHARDED = "FSDP"  # what fully_shard puts before the name of the class of a module


def bytes_of(param_dtype: str) -> int:
    """Bytes of one weight of a type of ``DTYPES``."""
    return (DTYPES[param_dtype] or torch.float32).itemsize


def lm_of(model: nn.Module) -> Any:
    """The transformers model inside one of ours."""
    return model.get_submodule("lm")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Modules of the classes that a transformers model lists in ``_no_split_modules``; none of them inside another.

    Raises:
        ConfigError: it lists none.
    """
    names = set(lm_of(model)._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__.removeprefix(SHARDED) in names]
    inside = {id(part) for block in found for part in block.modules() if part is not block}  # Mamba lists both
    blocks = [block for block in found if id(block) not in inside]
    if not blocks:
        raise ConfigError(
            key="strategy",
            got=type(lm_of(model)).__name__,
            because="this model does not name its blocks (_no_split_modules), so it cannot be sharded block by block",
            fix="Use strategy=ddp",
        )
    return blocks


def fp32_parts(model: nn.Module, param_dtype: torch.dtype | None) -> list[nn.Module]:
    """Modules whose weights are gathered in float32 though all others are gathered in ``param_dtype``.

    Raises:
        ConfigError: the family keeps a parameter in float32 that lies beside others of the same module.
    """
    if param_dtype is None:
        return []
    names, head = fp32_names(model, strict=True), lm_of(model).get_output_embeddings()
    parts = [part for part in fp32_modules(model, names) if part is not head]  # its weight is read past its forward
    apart = {parameter for part in parts for parameter in part.parameters()}
    check_no_fp32_weights([n for n, p in model.named_parameters() if names.search(n) and p not in apart], param_dtype)
    return parts


def matrices_cast(model: nn.Module, param_dtype: torch.dtype | None) -> frozenset[nn.Module]:
    """The linear layers whose weights can be gathered in bfloat16 without changing a bit: autocast casts them anyway.

    None where all weights are gathered in ``param_dtype``, where products are not made in bfloat16, where a layer reads
    weights of modules that it never calls, and where blocks are compiled.
    """
    described: Any = model  # a policy or a value model
    if param_dtype is not None or described.compute_dtype is not torch.bfloat16 or described.state_classes:
        return frozenset()
    if getattr(described, "compiled", False):
        return frozenset()
    names = linear_weights(model)
    return frozenset(
        module for name, module in model.named_modules() if f"{name}.weight" in names and not is_adapter(name)
    )


def is_small(block: nn.Module, matrices: Sequence[nn.Module]) -> bool:
    """Whether what a block has beside ``matrices`` may be gathered with what is outside of blocks."""
    apart = {parameter for module in matrices for parameter in module.parameters()}
    rest = sum(parameter.numel() for parameter in block.parameters() if parameter not in apart)
    return rest <= SMALL * sum(parameter.numel() for parameter in block.parameters())


def check_no_fp32_weights(names: Sequence[str], param_dtype: torch.dtype | None) -> None:
    """Refuse to round weights that the family keeps in float32.

    Raises:
        ConfigError: names the first of them.
    """
    if names and param_dtype is not None:
        raise ConfigError(
            key="strategy.param_dtype",
            got=str(param_dtype).removeprefix("torch."),
            because=f"the model keeps {names[0]} in float32, and this strategy would round it with the others",
            fix="Use strategy.param_dtype=float32 with model.precision=bf16-mixed",
        )
