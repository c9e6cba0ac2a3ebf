"""One process, one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.sharding import Sharding
from strategies.parts.offload import OffloadConfig
from strategies.parts.strategy_mixin import StrategyMixin, inner_models_of
from strategies.registry import MODEL_TYPES, STRATEGIES


@dataclass(frozen=True)
class SingleConfig(OffloadConfig):
    """Config of ``strategy=single``."""


@STRATEGIES.register(model_type=MODEL_TYPES, backend="single", device=["cpu", "cuda", "npu", "xpu", "mps"])
class SingleStrategy(StrategyMixin, SingleDeviceStrategy):
    """The reference that every other strategy must agree with."""

    config_class: ClassVar[type] = SingleConfig

    def __init__(self, config: SingleConfig, *, device: str, num_processes: int, num_nodes: int) -> None:
        if num_processes * num_nodes > 1:
            raise ConfigError(
                key="trainer.devices",
                got=num_processes,
                because=f"strategy=single runs one process, not {num_processes * num_nodes}",
                fix="Use strategy=ddp, or trainer.devices=1",
            )
        self.offload = config
        super().__init__(device=torch.device(device, 0) if device != "cpu" else torch.device("cpu"))

    @classmethod
    def sharding_of(cls, config: SingleConfig, layout: Layout) -> Sharding:
        """Nothing is shared; moments may wait in host memory."""
        return Sharding(on_host=config.on_host())

    def model_to_device(self) -> None:
        """Nothing: ``wrap`` moves the inner models."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.shard(inner_models_of(model))
        return model
