"""VeOmni: its parallelizer around the models; fsdp2 for the rest.

It imports output classes that today's transformers no longer has; while it is imported, empty ones stand in their
places. It is told to leave transformers' attentions alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from rlmodule.core.contract import ModelSpec
from strategies.fsdp2 import FewerKeysConfig, FSDP2Strategy
from strategies.parts.blocks import lm_of
from strategies.parts.foreign_imports import import_part
from strategies.parts.numbers import give_numbers, take_numbers
from strategies.parts.refusals import check_kind
from strategies.parts.releases import require_release
from strategies.registry import MODEL_TYPES, STRATEGIES

NAME = "veomni"
require_release(NAME, "0.1.12", strategy=NAME, apart=True)

KINDS = ("llama", "qwen2", "qwen3")
# It would register attentions of its own with transformers, and tell of every module that it wraps.
ENVIRONMENT = {"MODELING_BACKEND": "hf", "VEOMNI_VERBOSITY": os.environ.get("VEOMNI_VERBOSITY", "WARNING")}
MODELS = "transformers.models"
# Multimodal families, none of which is built here.
MISSING = {
    f"{MODELS}.{place}.{name}": CausalLMOutputWithPast
    for place, name in (
        ("qwen2_5_omni.modeling_qwen2_5_omni", "Qwen2_5OmniThinkerCausalLMOutputWithPast"),
        ("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLCausalLMOutputWithPast"),
        ("qwen2_vl.modeling_qwen2_vl", "Qwen2VLCausalLMOutputWithPast"),
        ("qwen3_omni_moe.modeling_qwen3_omni_moe", "Qwen3OmniMoeThinkerCausalLMOutputWithPast"),
        ("qwen3_vl.modeling_qwen3_vl", "Qwen3VLCausalLMOutputWithPast"),
        ("qwen3_vl_moe.modeling_qwen3_vl_moe", "Qwen3VLMoeCausalLMOutputWithPast"),
    )
}


@dataclass(frozen=True)
class VeOmniConfig(FewerKeysConfig):
    """Config of ``strategy=veomni``: keys of fsdp2, less what was not run with it."""

    tp_size: ClassVar[int] = 1  # type: ignore[misc]
    dp_replicate: ClassVar[int] = 1  # type: ignore[misc]
    param_dtype: ClassVar[str] = "float32"  # type: ignore[misc]


@STRATEGIES.register(model_type=MODEL_TYPES, backend=NAME, device=["cpu", "cuda", "npu"])
class VeOmniStrategy(FSDP2Strategy):
    """It wants parameters on the meta device; they are given their numbers after it has cut them."""

    config_class: ClassVar[type] = VeOmniConfig
    config: VeOmniConfig
    _veomni: Any  # parts/veomni_wrapping.py

    def check_model(self, spec: ModelSpec, hf_config: Any) -> None:
        """Refuse what was not run with it.

        Raises:
            ConfigError: names the kind of model.
        """
        check_kind(hf_config, NAME, KINDS)

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Have it make its groups, once for all models."""
        if not self._models and self.layout.world_size > 1:
            self._veomni = import_part("veomni_wrapping", needs=MISSING, environment=ENVIRONMENT)
            self._veomni.make_groups(self.layout.dp_sp_size, self.root_device)
        super().shard(models)

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Take the numbers out, have it cut what is left, and give them back as it was cut."""
        if self.layout.world_size == 1:
            return super().wrap(name, model)  # one process shards nothing, and VeOmni refuses it
        numbers, blocks = take_numbers(model), lm_of(model)._no_split_modules
        cut: nn.Module = self._veomni.parallelize(
            model, blocks, reshard_after_forward=self.config.reshard_after_forward
        )
        give_numbers(cut, numbers, self.root_device)
        return cut
