"""Compiles the blocks of a model. Attention stays uncompiled: its shapes are new in every micro-batch.

A compiled block rounds differently, and differently with and without gradients: the first ratio of an update is then 1
up to rounding instead of exactly. Leaves out sampling, which runs uncompiled (its shapes change with every token).
"""

from __future__ import annotations

import shutil

import torch
from transformers import AttentionInterface, PreTrainedModel

from rlmodule.core.errors import ConfigError
from rlmodule.models.attention import attention_forward

ATTENTION_UNCOMPILED = "rlmodule_uncompiled"


def check_compiler(device: str) -> None:
    """Refuse to compile without a compiler; otherwise the first step would fail.

    Raises:
        ConfigError: names what is missing.
    """
    if device == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise ConfigError(
            key="model.compile",
            got=True,
            because="compiling for the CPU needs a C++ compiler, and none is on the PATH",
            fix="Use model.compile=false",
        )


def compile_blocks(lm: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile every block of ``lm`` in place; names of weights stay as they are.

    Raises:
        ConfigError: the model does not say what its blocks are.
    """
    names = set(lm._no_split_modules or ())
    blocks = [module for module in lm.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(
            key="model.compile",
            got=True,
            because=f"{type(lm).__name__} does not say what its blocks are",
            fix="Use model.compile=false",
        )
    AttentionInterface.register(ATTENTION_UNCOMPILED, torch.compiler.disable(attention_forward))
    lm.set_attn_implementation(ATTENTION_UNCOMPILED)
    for block in blocks:
        block.compile(backend=backend, dynamic=True)
