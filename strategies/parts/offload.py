"""Tensors that wait in host memory while nobody needs them: parameters between passes, moments between steps.

A tensor stays the object it is, on the device it is on, because optimizers, wrappers and gradient hooks hold on to it;
only its storage is emptied on the way out and filled on the way in. So the same code serves every backend whose weights
are plain tensors or pieces of them, and a CPU shows what a device would do. Leaves out what is offloaded (``shard`` and
the optimizers say that), and DeepSpeed, which has means of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmodule.core.errors import ConfigError


@dataclass(frozen=True)
class OffloadConfig:
    """What gives its device memory back while it is not used."""

    offload_params: bool = False  # weights wait in host memory outside of sampling, scoring and training
    offload_optimizer: bool = False  # both moments wait in host memory until the optimizer steps


def check_offload_once(cpu_offload: bool, config: OffloadConfig) -> None:
    """A backend that keeps everything in host memory at all times has nothing to bring there.

    Raises:
        ConfigError: names the key that has no effect.
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
        tensors: gives them, as this process holds them; asked whenever they are put away, since there may be new ones.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._depth = 0
        self._changed = True
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # (on the device, in host memory)

    @contextmanager
    def on_device(self, *, changes: bool) -> Iterator[None]:
        """On the device inside, away again afterwards, also on error; within another such block nothing moves.

        ``changes`` says that the tensors may be written to, so that host memory needs the new numbers.
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
        """Fill every storage on the device; where there is no room for all of them, none is left filled."""
        try:
            for storage, copied in self._away:
                storage.resize_(copied.nbytes())
                storage.copy_(copied)
        except RuntimeError:
            self._empty()
            raise

    def offload(self) -> None:
        """Empty every storage on the device, once host memory has all numbers; its own storages are kept for that."""
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
    """As many bytes; page-locked where that makes copies from a device faster."""
    fresh = torch.UntypedStorage(storage.nbytes())
    return fresh.pin_memory(storage.device) if storage.device.type == "cuda" else fresh
