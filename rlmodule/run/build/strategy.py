"""The strategy chosen by name, for this machine and these models.

The registry is handed in, so that this package never imports ``strategies``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedConfig

from rlmodule.batching.row_sharing import with_shared_rows
from rlmodule.core.backends import BackendStatus
from rlmodule.core.config import convert
from rlmodule.core.contract import LANGUAGE_MODEL, POLICY_VALUE, VALUE_MODEL, Strategy, StrategyClass
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.sharding import Sharding
from rlmodule.models.description import NO_VALUE, SEPARATE, SHARED, ModelConfig, load_model_config
from rlmodule.run.build.machine import Machine
from rlmodule.run.build.models import critic_model
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.layout import with_parts_for_heads
from rlmodule.run.preflight.teacher import teacher_model

# Kinds of models that train in a run, by model.value.
MODEL_TYPES = {
    NO_VALUE: (LANGUAGE_MODEL,),
    SHARED: (POLICY_VALUE,),
    SEPARATE: (LANGUAGE_MODEL, VALUE_MODEL),
}


class StrategyRegistry(Protocol):
    """What a run needs of the strategy registry."""

    def lookup(
        self, model_type: str, backend: str, *, device: str | None = None, vendor: str | None = None
    ) -> StrategyClass:
        """The class that runs this kind of model on this machine; None for what the machine has."""

    def backends(self) -> list[str]:
        """Names of every backend that can be chosen, without importing any."""

    def status(self, backend: str) -> BackendStatus:
        """What a run that chooses the backend would get here, and why where it would get nothing."""


@dataclass(frozen=True)
class StrategyChoice:
    """The strategy that a run has chosen, before it is made.

    Args:
        config: of the run.
        machine: where it happens.
        registry: strategies to choose from.
        node: the strategy section as configured; its keys belong to the chosen strategy.
        describe: reads the configuration of a model.
    """

    config: RunConfig
    machine: Machine
    registry: StrategyRegistry
    node: Mapping[str, Any]
    describe: Callable[[ModelConfig], PreTrainedConfig] = load_model_config

    @property
    def layout(self) -> Layout:
        """The layout of the run, seen from rank 0.

        Raises:
            ConfigError: data ranks cannot share rows in it as configured.
        """
        layout = self._class.layout_of(self._strategy_config, self.machine.world_size)
        shared = with_shared_rows(layout, self.config.batching, self.config.trainer.num_nodes)
        return shared if shared.max_sp_size == 1 else with_parts_for_heads(shared, self._models_of_run)

    @property
    def sharding(self) -> Sharding:
        """How a model that trains is spread, for planning."""
        return self._class.sharding_of(self._strategy_config, self.layout)

    def build(self) -> Strategy:
        """The strategy.

        Raises:
            ConfigError: its config does not fit the number of processes, or rows that are shared by plan.
        """
        strategy = self._class(
            self._strategy_config,
            device=self.machine.device,
            num_processes=self.machine.num_processes,
            num_nodes=self.config.trainer.num_nodes,
        )
        layout = self.layout
        most = layout.max_sp_size
        if most > 1 and not strategy.shares_rows:
            raise ConfigError(
                key="batching.max_sp_size",
                got=most,
                because=f"strategy={self.config.backend} was not run with rows that data ranks share by plan",
                fix="Use strategy=ddp, fsdp, fsdp2 or deepspeed, or batching.max_sp_size=1",
            )
        if most > 1:
            strategy.share_rows(most, layout.max_cp_size)
        return strategy

    @property
    def _class(self) -> StrategyClass:
        device = os.environ.get("RLMODULE_DEVICE") or self.machine.device
        found = [self.registry.lookup(kind, self.config.backend, device=device) for kind in self._model_types]
        assert len(set(found)) == 1, f"one strategy spreads all models of a run, got {found}"
        return found[0]

    @property
    def _models_of_run(self) -> list[PreTrainedConfig]:
        """Configurations of every model that computes rows; one that cannot be read is refused elsewhere."""
        config, found = self.config, list[PreTrainedConfig]()
        models = [config.model]
        if config.model.value == SEPARATE:
            models.append(critic_model(config))
        if config.algorithm.teacher is not None:
            models.append(teacher_model(config))
        for model in models:
            with suppress(ConfigError):
                found.append(self.describe(model))
        return found

    @property
    def _model_types(self) -> tuple[str, ...]:
        model = self.config.model
        return (VALUE_MODEL,) if model.is_reward_model else MODEL_TYPES[model.value]

    @property
    def _strategy_config(self) -> Any:
        return convert(self._class.config_class, self.node, "strategy", ignore=("name",))
