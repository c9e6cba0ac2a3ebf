"""What a strategy that is built on fsdp2 refuses in words, before a model is loaded: kinds of models and settings."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rlmodule.core.errors import ConfigError


def check_kind(hf_config: Any, strategy: str, wired: Collection[str]) -> None:
    """Refuse a kind of model that ``strategy`` was not run with; ``hf_config`` is the model's configuration.

    Raises:
        ConfigError: names the kind.
    """
    if hf_config.model_type not in wired:
        refuse(strategy, f"it has no wiring for models of type {hf_config.model_type}, only for {', '.join(wired)}")


def refuse(strategy: str, because: str, fix: str = "strategy=fsdp2") -> None:
    """Refuse something that a model is or has.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(key="strategy", got=strategy, because=because, fix=f"Use {fix}")
