"""What every strategy of several processes shares: the process group, the grid of ranks, and what they agree on.

Lightning's DDP strategy is used for its launcher and process group alone; none of its wrapping is. Leaves out how a
model is spread; that is a backend's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy

from rlmodule.core.config import at_least
from rlmodule.core.contract import Layout
from strategies.parts.collectives import GroupCollectives
from strategies.parts.failures import first_error
from strategies.parts.mesh import Mesh, check_degrees
from strategies.parts.offload import OffloadConfig
from strategies.parts.strategy_mixin import StrategyMixin, inner_models_of
from strategies.parts.ulysses import Ulysses


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes are laid out; part of the options of every strategy of several processes."""

    sp_size: int = 1  # processes that share a sequence (Ulysses)

    def __post_init__(self) -> None:
        at_least("sp_size", self.sp_size, 1)

    @property
    def grid(self) -> dict[str, int]:
        """Keywords of ``Mesh.of_running``."""
        return {"sp_size": self.sp_size}

    @property
    def offload(self) -> OffloadConfig:
        """What waits in host memory between uses: nothing, where a backend has means of its own."""
        return OffloadConfig()


@dataclass(frozen=True)
class OffloadParallelConfig(ParallelConfig, OffloadConfig):
    """The same, of a backend whose weights and moments may wait in host memory."""

    @property
    def offload(self) -> OffloadConfig:
        """Its own keys."""
        return self


class DistributedStrategy(StrategyMixin, LightningDDPStrategy):
    """Base of the backends of several processes."""

    mesh: Mesh
    exchange_device: torch.device  # where the process group wants its tensors

    def __init__(self, options: Any, *, device: str, num_processes: int, num_nodes: int) -> None:
        check_degrees(num_processes * num_nodes, **options.grid)
        super().__init__()
        self._options = options
        self.offload = options.offload

    @classmethod
    def layout_of(cls, options: Any, world_size: int) -> Layout:
        """The layout a run will have, known before its processes are started."""
        degrees = options.grid
        return Layout(world_size, sp_size=degrees.get("sp_size", 1), tp_size=degrees.get("tp_size", 1))

    def setup_distributed(self) -> None:
        """Join the process group, then see where this process sits."""
        super().setup_distributed()
        self.mesh = Mesh.of_running(self.root_device.type, **self._options.grid)
        self.layout = self.mesh.layout
        self.exchange_device = torch.device("cpu") if self._process_group_backend == "gloo" else self.root_device
        self.collectives = GroupCollectives(self.exchange_device, self.mesh.token_group)
        self.sequence = Ulysses.of(self.mesh.sequence_group, self.exchange_device)

    def model_to_device(self) -> None:
        """Whole models stay where they are; ``wrap`` puts on the device what this process keeps."""

    def configure_ddp(self) -> None:
        """Lightning's place for wrapping: wrap the inner models instead of the LightningModule."""
        self.shard(inner_models_of(self.lightning_module))

    def gather_first_error(self, problem: str | None) -> str | None:
        """The first problem that any process has, on every process; one exchange between all of them."""
        return first_error(problem)
