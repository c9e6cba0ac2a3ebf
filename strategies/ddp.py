"""Distributed data parallel: every process holds the whole model, gradients are averaged over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlmodule.core.config import at_least
from strategies.parts.processes import Degrees, ManyProcesses
from strategies.registry import STRATEGIES


@dataclass(frozen=True)
class DDPOptions(Degrees):
    """Knobs of the gradient exchange."""

    bucket_cap_mb: int = 25  # megabytes of gradients per all-reduce
    gradient_as_bucket_view: bool = True  # gradients live in the buckets: one copy of them less

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("bucket_cap_mb", self.bucket_cap_mb, 1)


@STRATEGIES.register(model_type="language_model", backend="ddp", device=["cpu", "cuda", "npu", "xpu"])
class DDPStrategy(ManyProcesses):
    """DDP around each trainable inner model; frozen ones are left as they are."""

    options: ClassVar[type] = DDPOptions
    _options: DDPOptions

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """The wrapper stays outside the module tree, so parameter names carry no prefix."""
        model = super().wrap(name, model)
        if not any(p.requires_grad for p in model.parameters()):
            return model
        # Buffers are rotary tables, the same everywhere: broadcasting them every step would be waste.
        return DistributedDataParallel(
            model,
            device_ids=self.determine_ddp_device_ids(),
            forward_sync_buffers=False,
            bucket_cap_mb=self._options.bucket_cap_mb,
            gradient_as_bucket_view=self._options.gradient_as_bucket_view,
        )

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Gradients are exchanged once, with the last micro-batch's backward."""
        wrappers: list[Any] = [m for m in self._wrapped.values() if isinstance(m, DistributedDataParallel)]
        before = [w.require_backward_grad_sync for w in wrappers]
        for wrapper in wrappers:
            wrapper.require_backward_grad_sync = is_last
        try:
            yield
        finally:
            for wrapper, was in zip(wrappers, before, strict=True):
                wrapper.require_backward_grad_sync = was
