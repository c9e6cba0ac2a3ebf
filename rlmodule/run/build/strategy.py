"""The strategy chosen by name, for this machine and these models.

The registry is handed in, so that this package never imports ``strategies``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlmodule.run.build.machine import Machine
from rlmodule.core.config import convert
from rlmodule.core.contract import Layout
from rlmodule.models.description import NO_VALUE, SEPARATE, SHARED
from rlmodule.run.config import RunConfig

# What a strategy must be able to spread beside a policy alone, by model.value.
MODEL_TYPES = {
    NO_VALUE: ("language_model",),
    SHARED: ("policy_value",),
    SEPARATE: ("language_model", "value_model"),
}


class StrategyRegistry(Protocol):
    """What is asked of the strategy registry."""

    def lookup(self, model_type: str, backend: str, *, device: str | None = None, vendor: str | None = None) -> type:
        """The class for this machine."""


@dataclass(frozen=True)
class StrategyChoice:
    """How the models of a run are spread.

    Args:
        config: of the run.
        machine: where it happens.
        registry: strategies to choose from.
        node: the strategy section as configured; its keys belong to the chosen strategy.
    """

    config: RunConfig
    machine: Machine
    registry: StrategyRegistry
    node: Mapping[str, Any]

    @property
    def layout(self) -> Layout:
        """How the run's processes are laid out, seen from the first."""
        return self._class.layout_of(self._options, self.machine.world_size)

    def build(self) -> Any:
        """The strategy, which refuses options that do not fit the number of processes."""
        return self._class(
            self._options,
            device=self.machine.device,
            num_processes=self.machine.num_processes,
            num_nodes=self.config.trainer.num_nodes,
        )

    @property
    def _class(self) -> Any:
        device = os.environ.get("RLMODULE_DEVICE", self.machine.device)
        found = [
            self.registry.lookup(kind, self.config.backend, device=device)
            for kind in self._model_types
        ]
        assert len(set(found)) == 1, f"one strategy spreads all models of a run, got {found}"
        return found[0]

    @property
    def _model_types(self) -> tuple[str, ...]:
        model = self.config.model
        return ("value_model",) if model.is_reward_model else MODEL_TYPES[model.value]

    @property
    def _options(self) -> Any:
        return convert(self._class.options, self.node, "strategy", ignore=("name",))
