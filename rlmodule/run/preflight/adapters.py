"""LoRA: its package, and a base that somebody can load."""

from __future__ import annotations

from transformers import PreTrainedConfig

from rlmodule.callbacks.export import ExportConfig
from rlmodule.core.errors import ConfigError
from rlmodule.models.export import ADAPTER
from rlmodule.models.lora import check_installed, is_adapter
from rlmodule.models.size import size_of
from rlmodule.run.config import RunConfig


def check_lora(config: RunConfig) -> None:
    """Adapters need peft; exported alone they need a base that somebody can load."""
    if not config.model.lora.is_on:
        return
    check_installed()
    export = config.callbacks.get("export")
    if not isinstance(export, ExportConfig) or export.lora != ADAPTER:
        return
    reason = None
    if config.model.path is None and not config.needs_warm_start:
        reason = "the base is random weights that nobody keeps"
    elif is_adapter(config.model.path):
        reason = "the base is an adapter merged with its own base, which nobody keeps"
    if reason is not None:
        raise ConfigError(
            key="callbacks.export.lora", got=ADAPTER, because=reason, fix="Use callbacks.export.lora=merged"
        )


def check_target_modules(config: RunConfig, hf_config: PreTrainedConfig) -> None:
    """Adapters find the modules that they are for, in the model without its weights.

    Raises:
        ConfigError: the model has no such modules.
    """
    if config.model.lora.is_on:
        size_of(hf_config, config.model.lora)
