"""Base of every strategy of several processes: the process group, the grid of ranks, and the keys they share.

Lightning's DDP strategy is used for its launcher and process group only, none of its wrapping. Leaves out how a model
is spread, which a backend says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy

from rlmodule.core.config import at_least
from rlmodule.core.devices import support_of
from rlmodule.core.layout import Layout
from strategies.parts.collectives import GroupCollectives
from strategies.parts.failures import first_error
from strategies.parts.mesh import Mesh, check_degrees
from strategies.parts.offload import OffloadConfig
from strategies.parts.shared_row import SharedRow
from strategies.parts.strategy_mixin import StrategyMixin, inner_models_of

Item = TypeVar("Item")


@dataclass(frozen=True)
class ParallelConfig:
    """How processes are laid out; part of the config of every strategy of several processes."""

    sp_size: int = 1  # processes that share a packed row by exchanging heads (Ulysses sequence parallelism)
    cp_size: int = 1  # times as many share it by gathering keys and values (context parallelism)

    shares_rows: ClassVar[bool] = False  # whether the backend was run with rows that data ranks share by plan

    def __post_init__(self) -> None:
        at_least("sp_size", self.sp_size, 1)
        at_least("cp_size", self.cp_size, 1)

    @property
    def grid(self) -> dict[str, int]:
        """Keywords of ``Mesh.of_running``; a row has one slice for each of the processes that share it in any way."""
        return {"sp_size": self.sp_size * self.cp_size, "cp_size": self.cp_size}

    @property
    def offload(self) -> OffloadConfig:
        """What waits in host memory between uses: nothing, unless the config has keys for it."""
        return OffloadConfig()


@dataclass(frozen=True)
class OffloadParallelConfig(ParallelConfig, OffloadConfig):
    """ParallelConfig of a backend whose weights and moments may wait in host memory."""

    @property
    def offload(self) -> OffloadConfig:
        """The offload keys of this config."""
        return self


class DistributedStrategy(StrategyMixin, LightningDDPStrategy):
    """Base of the backends of several processes."""

    config: ParallelConfig
    mesh: Mesh
    exchange_device: torch.device  # device of tensors that the process group sends
    rows_by_plan: tuple[int, int] = (1, 1)  # most data ranks that share a row where the plan says so, and its parts

    def __init__(self, config: ParallelConfig, *, device: str, num_processes: int, num_nodes: int) -> None:
        check_degrees(num_processes * num_nodes, **config.grid)
        super().__init__(process_group_backend=support_of(device).collectives)
        self.config = config
        self.offload = config.offload

    @classmethod
    def layout_of(cls, config: ParallelConfig, world_size: int) -> Layout:
        """The layout of a run of ``world_size`` processes, seen from rank 0, before any process is started."""
        return Layout(world_size, **{key: size for key, size in config.grid.items() if key != "replicas"})

    def setup_distributed(self) -> None:
        """Join the process group and lay the grid of ranks over it."""
        super().setup_distributed()
        self.mesh = Mesh.of_running(self.root_device.type, **self.config.grid)
        most, parts = self.rows_by_plan
        self.layout = replace(self.mesh.layout, max_sp_size=most, max_cp_size=parts)
        self.exchange_device = torch.device("cpu") if self._process_group_backend == "gloo" else self.root_device
        self.collectives = GroupCollectives(self.exchange_device, self.mesh.token_group)
        self.sequences = SharedRow.by_width(self.mesh, self.exchange_device, self.layout)

    @property
    def shares_rows(self) -> bool:
        """As the config of the backend says."""
        return self.config.shares_rows

    def share_rows(self, most: int, parts: int = 1) -> None:
        """Groups of every width up to ``most`` are made when the processes have joined."""
        self.rows_by_plan = most, parts

    def model_to_device(self) -> None:
        """Nothing: ``wrap`` moves what this process keeps to the device."""

    def configure_ddp(self) -> None:
        """Wrap the inner models, where Lightning would wrap the LightningModule."""
        self.shard(inner_models_of(self.lightning_module))

    def gather_first_error(self, problem: str | None) -> str | None:
        """The first error message that any process passes in, on every process; one exchange between all of them."""
        return first_error(problem)

    def gather_from_all(self, item: Item) -> list[Item]:
        """One picklable object of every process, in rank order, on every process; one exchange between all of them."""
        if not dist.is_initialized():
            return [item]
        everyone: list[Item] = [item] * dist.get_world_size()
        dist.all_gather_object(everyone, item)
        return everyone
