"""The repeated blocks of a transformer, which are sharded one by one; and the dtypes weights may be gathered in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlmodule.core.errors import ConfigError

DTYPES: Mapping[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}


def lm_of(model: nn.Module) -> Any:
    """The transformers model inside one of ours."""
    return model.get_submodule("lm")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Modules of the classes that a transformers model lists in ``_no_split_modules``, outermost first.

    Raises:
        ConfigError: it lists none.
    """
    names = set(lm_of(model)._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(
            key="strategy",
            got=type(lm_of(model)).__name__,
            because="this model does not name its blocks (_no_split_modules), so it cannot be sharded block by block",
            fix="Use strategy=ddp",
        )
    return blocks
