"""Bytes that operations allocate, counted by what they return: not what the process holds, which differs by machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Live and peak bytes of the storages that operations made inside; views and the meta device make none.

    A storage may be emptied and filled again, as gathered weights are: its bytes come and go with that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __enter__(self) -> Allocations:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._resize(storage, size)
            if storage._cdata in self._known:
                self._count(storage._cdata, size)
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*failure)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        makes_views = any(result.alias_info is not None for result in func._schema.returns)
        for tensor in [] if makes_views else tree_leaves(out):
            held = self._held(tensor)
            if held is not None and held.layout is torch._mkldnn:
                self._made(held, held.numel() * held.element_size(), id(held))
            elif held is not None and not held.is_meta:
                storage = held.untyped_storage()
                self._made(storage, storage.nbytes(), storage._cdata)
        return out

    def _held(self, tensor: Any) -> torch.Tensor | None:
        """The plain tensor that holds the numbers of a result; None where it is another kind of tensor, or none."""
        return tensor if type(tensor) is torch.Tensor else None

    def _made(self, holder: Any, nbytes: int, key: int) -> None:
        """``holder`` is a storage, or a weight as oneDNN lays it out, which has none."""
        if key not in self._known and nbytes:
            self._known[key] = 0
            self._count(key, nbytes)
            weakref.finalize(holder, self._freed, key)

    def _count(self, key: int, size: int) -> None:
        self.live += size - self._known[key]
        self.peak = max(self.peak, self.live)
        self._known[key] = size

    def _freed(self, key: int) -> None:
        self.live -= self._known.pop(key)


class AllocationsWithShards(Allocations):
    """The same with what operations on DTensors make, of which the mode sees no plain tensor."""

    def _held(self, tensor: Any) -> torch.Tensor | None:
        return super()._held(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
