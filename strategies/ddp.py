"""Distributed data parallel: every process holds the whole model, gradients are averaged over data ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlmodule.core.config import at_least
from strategies.parts.collectives import GroupCollectives
from strategies.parts.inner_models import InnerModels, inner_models_of
from strategies.parts.mesh import current_layout
from strategies.registry import STRATEGIES


@dataclass(frozen=True)
class DDPOptions:
    """Knobs of the gradient exchange."""

    bucket_cap_mb: int = 25  # megabytes of gradients per all-reduce
    gradient_as_bucket_view: bool = True  # gradients live in the buckets: one copy of them less

    def __post_init__(self) -> None:
        at_least("bucket_cap_mb", self.bucket_cap_mb, 1)


@STRATEGIES.register(model_type="language_model", backend="ddp", device=["cpu", "cuda", "npu", "xpu"])
class DDPStrategy(InnerModels, LightningDDPStrategy):
    """DDP around each trainable inner model; frozen ones are left as they are."""

    options: ClassVar[type] = DDPOptions

    def __init__(self, options: DDPOptions, *, device: str, num_processes: int, num_nodes: int) -> None:
        super().__init__()
        self._options = options

    def setup_distributed(self) -> None:
        """Join the process group, then see where this process sits."""
        super().setup_distributed()
        self.layout = current_layout()
        device = torch.device("cpu") if self._process_group_backend == "gloo" else self.root_device
        self.collectives = GroupCollectives(device)

    def configure_ddp(self) -> None:
        """Lightning's place for wrapping: wrap the inner models instead of the LightningModule."""
        self.shard(inner_models_of(self.lightning_module))

    def wrap(self, model: nn.Module) -> nn.Module:
        """The wrapper stays outside the module tree, so parameter names carry no prefix."""
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
