"""Offloading: parameters wait in host memory between passes, moments between steps.

The tensor object and its device stay the same, because optimizers, wrappers and gradient hooks refer to it; only its
storage is emptied and filled. So the code serves every backend whose weights are plain tensors or shards, and can be
tested on a CPU. Leaves out what is offloaded (``strategy_mixin.py``), and DeepSpeed, which offloads by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmodule.core.errors import ConfigError
from rlmodule.core.sharding import waiting_on_host


@dataclass(frozen=True)
class OffloadConfig:
    """What waits in host memory while it is not used."""

    offload_params: bool = False  # weights wait in host memory outside of sampling, scoring and training
    offload_optimizer: bool = False  # both moments wait in host memory until the optimizer steps

    def on_host(self, *, cpu_offload: bool = False) -> frozenset[str]:
        """What waits there while a model trains, for plans (``Sharding.on_host``): all of it with ``cpu_offload``."""
        moments = cpu_offload or self.offload_optimizer
        return waiting_on_host(weights=cpu_offload, gradients=cpu_offload, moments=moments)


def check_offload_once(cpu_offload: bool, config: OffloadConfig) -> None:
    """Reject offload keys that have no effect because ``cpu_offload`` keeps everything in host memory.

    Raises:
        ConfigError: names the key.
    """
    for key in ("offload_params", "offload_optimizer"):
        if cpu_offload and getattr(config, key):
            raise ConfigError(
                key=key,
                got=True,
                because="with cpu_offload=true shards, gradients and moments are in host memory at all times",
                fix=f"Use strategy.{key}=false, or strategy.cpu_offload=false",
            )


class Offloaded:
    """Tensors that are on their device inside of ``on_device`` and in host memory otherwise.

    Args:
        tensors: returns them, as this process holds them; called at every offload, since new ones may have been made.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._depth = 0
        self._changed = True
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # (on the device, in host memory)

    @contextmanager
    def on_device(self, *, changes: bool) -> Iterator[None]:
        """Context with the tensors on the device; offloaded on exit, also on error. Nested contexts move nothing.

        ``changes`` says that the tensors may be written to, so that they must be copied back.
        """
        if self._depth == 0:
            self.onload()
        self._depth += 1
        self._changed |= changes
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.offload()

    def onload(self) -> None:
        """Fill every storage on the device; all are emptied again if the device runs out of memory."""
        try:
            for storage, copied in self._away:
                storage.resize_(copied.nbytes())
                storage.copy_(copied)
        except RuntimeError:
            self._empty()
            raise

    def offload(self) -> None:
        """Copy the tensors to host memory where they have changed, and empty their storages on the device.

        Buffers in host memory are kept and used again.
        """
        known = {storage._cdata: copied for storage, copied in self._away}
        found = {s._cdata: s for s in (t.untyped_storage() for t in self._tensors()) if s.nbytes() and s.resizable()}
        away = []
        for key, storage in found.items():
            copied = known.get(key)
            if copied is None or copied.nbytes() != storage.nbytes():
                copied = _host_memory(storage)
                copied.copy_(storage)
            elif self._changed:
                copied.copy_(storage)
            away.append((storage, copied))
        self._away, self._changed = away, False
        self._empty()

    def _empty(self) -> None:
        for storage, _ in self._away:
            storage.resize_(0)


def _host_memory(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A buffer in host memory of the same size; page-locked for CUDA devices."""
    fresh = torch.UntypedStorage(storage.nbytes())
    return fresh.pin_memory(storage.device) if storage.device.type == "cuda" else fresh
