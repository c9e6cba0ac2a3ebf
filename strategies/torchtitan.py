"""torchtitan: its transformer blocks, split over tensor ranks as it says, inside our models; fsdp2 for the rest.

Sampling, export and checkpoints see a transformers model: parameters keep its names (``parts/torchtitan_blocks.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from rlmodule.core.contract import ModelSpec
from strategies.fsdp2 import FewerKeysConfig, FSDP2Strategy
from strategies.parts.blocks import lm_of
from strategies.parts.foreign_imports import import_part
from strategies.parts.refusals import check_kind, refuse
from strategies.parts.releases import require_release
from strategies.parts.tensor_parallel import check_heads
from strategies.registry import MODEL_TYPES, STRATEGIES

NAME = "torchtitan"
require_release(NAME, "0.3.0", strategy=NAME)

KINDS = ("llama", "qwen3")
LACKING = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}


@dataclass(frozen=True)
class TorchTitanConfig(FewerKeysConfig):
    """Config of ``strategy=torchtitan``: keys of fsdp2, less what was not run with it."""


@STRATEGIES.register(model_type=MODEL_TYPES, backend=NAME, device=["cpu", "cuda"])
class TorchTitanStrategy(FSDP2Strategy):
    """Blocks are exchanged where matrices would be split; fsdp2 then shards them as it would those of transformers."""

    config_class: ClassVar[type] = TorchTitanConfig
    config: TorchTitanConfig

    def check_model(self, spec: ModelSpec, hf_config: Any) -> None:
        """Refuse what torchtitan's blocks do not compute.

        Raises:
            ConfigError: names the kind of model or the setting.
        """
        check_kind(hf_config, NAME, KINDS)
        for key, wanted in LACKING.items():
            found = getattr(hf_config, key, wanted)
            if found != wanted:
                refuse(NAME, f"this model has {key}={found}, and torchtitan's blocks compute it with {wanted} alone")
        if spec.config.compile:
            refuse(NAME, "it replaces the blocks that model.compile=true would compile", "model.compile=false")
        if self.config.tp_size > 1:
            check_heads(hf_config, self.config.tp_size)
            if spec.config.lora.is_on:
                refuse(NAME, "adapters beside its matrices cannot be split over tensor ranks", "strategy.tp_size=1")

    def split_matrices(self, model: nn.Module, apart: Collection[str] = ()) -> None:
        """Put torchtitan's blocks into the model, split over tensor ranks as it says."""
        import_part("torchtitan_blocks").put_blocks(lm_of(model), self.mesh.tensor)
