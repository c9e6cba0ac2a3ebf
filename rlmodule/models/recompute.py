"""Activation checkpointing: what a block computed forward is thrown away and made again in backward. No number changes.

What is kept, the input of each block, may wait in host memory meanwhile.

Leaves out how blocks are sharded (``strategies/``) and what is computed (the model's own code).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from rlmodule.core.errors import ConfigError

NONE, FULL, SELECTIVE = "none", "full", "selective"
MODES = (NONE, FULL, SELECTIVE)

# What costs most to make again for the bytes it takes. (An exchange between ranks is made again: it fills a buffer in
# place, which cannot be kept from here.)
_aten = torch.ops.aten
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_attention_math.default,
}


def check_offload(device: str) -> None:
    """Refuse to bring activations into host memory where they are there already.

    Raises:
        ConfigError: the device is the CPU.
    """
    if device == "cpu":
        raise ConfigError(
            key="model.activation_offload",
            got=True,
            because="on a CPU activations are in host memory already",
            fix="Use model.activation_offload=false",
        )


def recompute_activations(lm: PreTrainedModel, mode: str, *, offload: bool = False) -> None:
    """Make ``lm`` recompute its blocks in train mode: all of a block (full), or all but matrix products and attention.

    With ``offload`` the inputs of the blocks wait in host memory. Weights never do, whatever strategy gathers them: no
    block saves one.

    Raises:
        ConfigError: the model does not offer it.
    """
    if mode == NONE:
        return
    if not lm.supports_gradient_checkpointing:
        raise ConfigError(
            key="model.activation_checkpointing",
            got=mode,
            because=f"{type(lm).__name__} does not offer it",
            fix="Use model.activation_checkpointing=none",
        )
    how: dict[str, Any] = {"use_reentrant": False}
    if mode == SELECTIVE:
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_or_make_again)
    lm.activation_checkpointing_enable(activation_checkpointing_kwargs=how, offload=offload)


def _keep_or_make_again(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
