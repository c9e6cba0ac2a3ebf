"""The copy of a sharded model that a process samples with.

Sampling runs a model a different number of times on each data rank, which a sharded forward does not allow. So every
process samples with a copy of its own, filled with whole weights and dropped afterwards. Tensor ranks, which draw the
same responses, share one: each has its part of the matrices of blocks, and what they hold whole otherwise. Matrices
are held in the type that products are computed in, as autocast would cast them at every token, and all else in fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlmodule.core.parameters import linear_weights, put, tied
from strategies.parts.gathering import Names


@dataclass(eq=False)
class GenerationCopy:
    """A model that has weights while it is used, and no longer than they are those of the model it was made of.

    Args:
        model: the copy.
        empty: all names of each of its parameters, and what stands there without weights, on the meta device; a
            DTensor where tensor ranks share it.
        matrices: all names of those that are held in the type of products.
    """

    model: nn.Module
    empty: Sequence[tuple[Names, nn.Parameter]]
    matrices: frozenset[str]
    _users: int = field(default=0, init=False)
    _is_filled: bool = field(default=False, init=False)

    @classmethod
    def of(cls, model: nn.Module, split: Callable[[nn.Module], object]) -> GenerationCopy:
        """In eval mode, without weights and with real buffers; ``split`` cuts it where tensor ranks share it."""
        weights = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
        copied = copy.deepcopy(model, weights).eval()
        matrices = linear_weights(copied)
        split(copied)
        return cls(copied, list(tied(copied)), matrices)

    def cast(self, names: Names, tensor: Tensor) -> Tensor:
        """A tensor, or any part of it, in the type that the copy holds it in."""
        dtype: torch.dtype | None = self.model.compute_dtype  # type: ignore[assignment]  # a policy or a value model
        return tensor.to(dtype) if self.matrices.issuperset(names) else tensor

    @contextmanager
    def filled(self, weights: Callable[[], Iterable[tuple[Names, Tensor]]], *, keep: bool = False) -> Iterator[None]:
        """Inside it has the weights, (all names, whole tensor) of each; it may nest, and is filled once.

        Afterwards it has them no longer, or with ``keep`` until ``drop``.
        """
        self._users += 1
        try:
            if not self._is_filled:
                self._fill(weights())
            with torch.no_grad():
                yield
        finally:
            self._users -= 1
            if not (keep and self._is_filled):
                self.drop()

    def drop(self) -> None:
        """Let the weights go, unless somebody uses them."""
        if self._users == 0:
            self._is_filled = False
            for names, parameter in self.empty:
                self._put(names, parameter)

    def _fill(self, weights: Iterable[tuple[Names, Tensor]]) -> None:
        likes = {name: parameter for names, parameter in self.empty for name in names}
        for names, tensor in weights:
            # Autocast keeps what it has cast only of weights that may have gradients.
            part = nn.Parameter(part_of(tensor, likes[names[0]]), requires_grad=tensor.dtype == torch.float32)
            self._put(names, part)
        self._is_filled = True

    def _put(self, names: Names, parameter: nn.Parameter) -> None:
        for name in names:
            put(self.model, name, parameter)


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that ``like`` has of it, on this rank; all of it where that is no DTensor."""
    if not isinstance(like, DTensor):
        return tensor.detach()
    cut = distribute_tensor(tensor.detach(), like.device_mesh, like.placements, src_data_rank=None)
    apart = cut.to_local().clone()  # or the whole tensor would stay
    return DTensor.from_local(
        apart, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
