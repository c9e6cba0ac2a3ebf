"""Parameters sharded over processes: the norm over all shards, and a whole copy to sample with.

Sampling runs a model a different number of times on each rank, which a sharded forward does not allow. So every rank
samples with a plain copy of the model, filled with whole weights tensor by tensor and dropped afterwards. This costs
the memory of one whole model while sampling, and decoding needs no communication. Matrices are held in the type that
products are computed in, as autocast would cast them at every token, and all else in fp32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlmodule.core.parameters import linear_weights, put, tied
from strategies.parts.distributed import DistributedStrategy
from strategies.parts.strategy_mixin import local, sum_of_squares


class ShardedStrategy(DistributedStrategy):
    """Base of the backends that shard parameters."""

    _meta_copies: dict[str, nn.Module]
    _depth: dict[str, int]

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Keep a copy of each model on the meta device to sample with, then shard the models."""
        if not self._models:
            self._meta_copies = {name: meta_copy(model) for name, model in models.items()}
            self._depth = dict.fromkeys(models, 0)
        super().shard(models)

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
        """The whole copy, which has weights inside ``generation_mode`` only."""
        return self._meta_copies[name]

    def generation_mode(self, name: str) -> AbstractContextManager[None]:
        """Context with the copy filled; every rank must enter it, and leaves it without waiting for the others."""
        return self._whole_copy(name)

    @contextmanager
    def _whole_copy(self, name: str) -> Iterator[None]:
        self._depth[name] += 1
        try:
            if self._depth[name] == 1:
                self._fill_copy(name)
            with torch.no_grad():
                yield
        finally:
            self._depth[name] -= 1
            if self._depth[name] == 0:
                self._empty_copy(name)

    def _fill_copy(self, name: str) -> None:
        copied = self._meta_copies[name]
        dtype: torch.dtype | None = copied.compute_dtype  # type: ignore[assignment]  # a policy or a value model
        matrices = linear_weights(copied)
        with self.parameters_on_device(name):
            for names, tensor in self.full_parameters(name):
                held = dtype if matrices.issuperset(names) else None
                # Autocast keeps what it has cast only of weights that may have gradients.
                weight = nn.Parameter(tensor.detach().to(self.root_device, held), requires_grad=held is None)
                for full_name in names:
                    put(copied, full_name, weight)

    def _empty_copy(self, name: str) -> None:
        copied = self._meta_copies[name]
        for names, weight in list(tied(copied)):
            empty = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
            for full_name in names:  # they stay one, for who asks the copy for its names
                put(copied, full_name, empty)


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode with its parameters on the meta device and real buffers."""
    weights = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, weights).eval()


def full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """The whole tensor of a DTensor, gathered on ``device``, also where its shards are in host memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    moved = tensor.to(device)
    assert isinstance(moved, DTensor), "a DTensor moved is a DTensor"
    return moved.full_tensor()
