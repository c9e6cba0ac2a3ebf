"""Activation checkpointing: activations of a block are dropped and recomputed in backward. No number changes.

The inputs of the blocks, which are kept, may be offloaded to host memory.

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

# Operations that cost most to recompute for the bytes they take. (Exchanges between ranks are recomputed: they fill a
# buffer in place, which a checkpoint policy cannot keep.)
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
    """Refuse to offload activations on a CPU.

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
    """Make ``lm`` recompute its blocks in train mode: all of a block (full), or all but matmuls and attention.

    With ``offload`` the inputs of the blocks are kept in host memory. Gathered weights never are: no block saves one.

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
