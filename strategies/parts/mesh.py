"""This process's place among the running processes. The one place that asks torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout, widths_of


def current_layout(sp_size: int = 1, tp_size: int = 1, cp_size: int = 1, pp_size: int = 1) -> Layout:
    """The layout of the running process group, or of a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return Layout()
    sizes = {"sp_size": sp_size, "tp_size": tp_size, "cp_size": cp_size, "pp_size": pp_size}
    return Layout(world_size=dist.get_world_size(), rank=dist.get_rank(), **sizes)


@dataclass(frozen=True)
class Mesh:
    """The running processes as a device mesh, outermost first: stages, replicas x shards (both data), sequence, tensor.

    Every group and mesh below but ``pipeline_group`` lies within one pipeline stage.

    Args:
        layout: sizes of the mesh and this process's place in it.
        grid: dimensions ``stage``, ``replicate``, ``shard``, ``sequence`` and ``tensor``.
    """

    layout: Layout
    grid: DeviceMesh

    @classmethod
    def of_running(
        cls,
        device: str,
        *,
        sp_size: int = 1,
        tp_size: int = 1,
        replicas: int = 1,
        cp_size: int = 1,
        pp_size: int = 1,
    ) -> Mesh:
        """Lay the mesh over the running process group; every process calls it. ``sp_size`` is that of the layout."""
        layout = current_layout(sp_size, tp_size, cp_size, pp_size)
        sizes = (pp_size, replicas, layout.dp_size // replicas, sp_size, tp_size)
        names = ("stage", "replicate", "shard", "sequence", "tensor")
        return cls(layout, init_device_mesh(device, sizes, mesh_dim_names=names))

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """Processes that hold the stages of one pipeline, in their order; None where each has every layer."""
        return self.grid["stage"].get_group() if self.layout.pp_size > 1 else None

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Processes that differ in their data rank only."""
        if self.grid["replicate"].size() == 1:
            return self.grid["shard"].get_group()
        return self._flat("replicate", "shard").get_group()

    @property
    def token_group(self) -> dist.ProcessGroup:
        """Processes that differ in their data or sequence rank, in the order of ``Layout.dp_sp_rank``."""
        return self.data_group if self.layout.sp_size == 1 else self._flat("replicate", "shard", "sequence").get_group()

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """Processes that share a packed row; None where rows are not cut."""
        return self.grid["sequence"].get_group() if self.layout.sp_size > 1 else None

    @property
    def row_groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Of the processes that share a row: those of the same part, and those with the same heads; None for one."""
        heads, parts = self.layout.heads_size, self.layout.cp_size
        if parts == 1 or heads == 1:
            return (self.sequence_group, None) if parts == 1 else (None, self.sequence_group)
        grid = self.grid["sequence"]._unflatten(0, (parts, heads), ("parts", "heads"))
        return grid["heads"].get_group(), grid["parts"].get_group()

    def neighbours(self, most: int) -> dict[int, dist.ProcessGroup]:
        """Width -> so many neighbours with this process among them, for each width above 1 up to ``most``.

        The first of them is a multiple of the width. Every process calls it: groups of all processes are made, in the
        same order everywhere.
        """
        widths = [width for width in widths_of(self.layout.world_size) if 1 < width <= most]
        return {width: self._made(width, apart=1) for width in widths}

    def with_same_heads(self, layout: Layout) -> dict[int, dist.ProcessGroup]:
        """Width -> those of so many neighbours that have this process's heads of other parts of the row.

        For each width of ``layout.max_sp_size`` that is cut into parts; every process calls it.
        """
        widths = [width for width in widths_of(layout.max_sp_size) if layout.parts_of(width) > 1]
        return {width: self._made(width, apart=layout.max_heads_size) for width in widths}

    def _made(self, width: int, *, apart: int) -> dist.ProcessGroup:
        """The group of this process among ``width`` neighbours, each ``apart`` from the next; makes those of all."""
        mine: list[dist.ProcessGroup] = []
        for first in range(0, self.layout.world_size, width):
            for place in range(first, first + apart):
                ranks = list(range(place, first + width, apart))
                group = dist.new_group(ranks)
                mine += [group] if self.layout.rank in ranks else []
        assert len(mine) == 1, f"rank {self.layout.rank} is in {len(mine)} groups of {width} neighbours"
        return mine[0]

    @property
    def tensor(self) -> DeviceMesh | None:
        """Processes that share every matrix; None where matrices are not cut."""
        return self.grid["tensor"] if self.layout.tp_size > 1 else None

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh that gradients are averaged over, data x sequence: one dimension, or (replicas, shards)."""
        if self.layout.sp_size == 1:
            return self.grid["shard"] if self.grid["replicate"].size() == 1 else self.grid["replicate", "shard"]
        shards = self._flat("shard", "sequence")
        if self.grid["replicate"].size() == 1:
            return shards
        return DeviceMesh._concatenate([self.grid["replicate"], shards])

    def _flat(self, *names: str) -> DeviceMesh:
        return self.grid[names]._flatten("_".join(names))


def check_degrees(
    world_size: int, *, sp_size: int = 1, tp_size: int = 1, replicas: int = 1, cp_size: int = 1, pp_size: int = 1
) -> None:
    """Check, before any process is started, that the degrees divide the number of processes.

    Raises:
        ConfigError: one of them does not.
    """
    left = world_size
    for key, size in (
        ("pp_size", pp_size),
        ("tp_size", tp_size),
        ("sp_size", sp_size // cp_size),
        ("cp_size", cp_size),
        ("dp_replicate", replicas),
    ):
        if left % size:
            raise ConfigError(
                key=f"strategy.{key}",
                got=size,
                because=f"it does not divide the {left} processes left for it, of {world_size} in all",
                fix=f"Use strategy.{key}=1, or trainer.devices that stages x tensor x sequence x replicas divide",
            )
        left //= size
