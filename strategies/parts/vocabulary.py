"""The tensor-parallel ranks as the head sees them, which have some of its rows each.

Leaves out what is exchanged and when (``rlmodule/ops/vocabulary.py``), and how a backend cuts its head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class VocabularyGroup:
    """One process group; implements ``VocabularyRanks``.

    Args:
        group: in the order of the rows.
        device: of tensors that its backend sends (gloo: cpu, nccl: the GPU).
        size, rank: of the group, and of this process in it.
    """

    group: dist.ProcessGroup
    device: torch.device
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh | None, device: torch.device) -> VocabularyGroup | None:
        """The ranks of a mesh of one dimension; None where every process has all rows."""
        return None if mesh is None else cls(mesh.get_group(), device, mesh.size(), mesh.get_local_rank())

    def max_(self, x: Tensor) -> Tensor:
        """The largest of all ranks' ``x``."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def _reduced(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        leaving = x.to(self.device)
        dist.all_reduce(leaving, how, group=self.group)
        return leaving.to(x.device)
