"""Parameters sharded over processes: the norm over all shards, and a copy to sample with (``generation_copy.py``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strategies.parts.distributed import DistributedStrategy
from strategies.parts.gathering import Casting, Names
from strategies.parts.generation_copy import GenerationCopy
from strategies.parts.strategy_mixin import local, sum_of_squares


class ShardedStrategy(DistributedStrategy):
    """Base of the backends that shard parameters."""

    _copies_to_sample: dict[str, GenerationCopy]

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Keep a copy of each model without weights to sample with, then shard the models."""
        if not self._models:
            self._copies_to_sample = {name: GenerationCopy.of(model, self.split_copy) for name, model in models.items()}
        super().shard(models)

    def split_copy(self, model: nn.Module) -> None:
        """Cut a copy to sample with over the ranks that draw the same tokens; here none share one."""

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> float:
        """Global norm over the shards of all processes: one all-reduce of one float64, whatever the layout."""
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None and local(parameter.grad).numel():
                by_copies.setdefault(self.copies_of(parameter), []).append(local(parameter.grad))
        mine = sum(sum_of_squares(local_shards) / copies for copies, local_shards in by_copies.items())
        total = torch.tensor(mine, dtype=torch.float64, device=self.exchange_device)
        dist.all_reduce(total)
        return math.sqrt(float(total))

    def copies_of(self, parameter: nn.Parameter) -> int:
        """Number of processes that hold the same shard of a parameter's gradient."""
        stage = self.layout.stage_size
        if not isinstance(parameter, DTensor):
            return stage
        mesh = parameter.device_mesh
        num_shards = math.prod(
            mesh.size(dim) for dim, place in enumerate(parameter.placements) if not place.is_replicate()
        )
        return stage // num_shards

    def generator(self, name: str) -> nn.Module:
        """The copy, which has weights inside ``generation_mode`` only."""
        return self._copies_to_sample[name].model

    def generation_mode(self, name: str, *, keep: bool = False) -> AbstractContextManager[None]:
        """Context with the copy filled; every rank must enter it, and leaves it without waiting for the others."""
        copied = self._copies_to_sample[name]
        return copied.filled(lambda: self._weights_of(name, copied.cast), keep=keep)

    def parameters_on_device(self, name: str, *, changes: bool = False) -> AbstractContextManager[None]:
        """Where parameters may change, a copy of them that was kept is dropped."""
        if changes:
            self._copies_to_sample[name].drop()
        return super().parameters_on_device(name, changes=changes)

    def _weights_of(self, name: str, cast: Casting) -> Iterator[tuple[Names, Tensor]]:
        with self.parameters_on_device(name):
            yield from self.full_parameters(name, cast)
