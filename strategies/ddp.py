"""Distributed data parallel: every process holds the whole model, gradients are averaged over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlmodule.core.config import at_least
from rlmodule.core.errors import TrainingError
from rlmodule.core.layout import Layout
from rlmodule.core.sharding import Sharding
from strategies.parts.distributed import DistributedStrategy, OffloadParallelConfig
from strategies.parts.gradients import fill_missing, sum_over
from strategies.registry import MODEL_TYPES, STRATEGIES

SHOWN = 5  # names of weights in an error


@dataclass(frozen=True)
class DDPConfig(OffloadParallelConfig):
    """Config of ``strategy=ddp``."""

    bucket_cap_mb: int = 25  # megabytes of gradients per all-reduce
    gradient_as_bucket_view: bool = True  # gradients live in the buckets: one copy of them less

    shares_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("bucket_cap_mb", self.bucket_cap_mb, 1)


@STRATEGIES.register(model_type=MODEL_TYPES, backend="ddp", device=["cpu", "cuda", "npu", "xpu"])
class DDPStrategy(DistributedStrategy):
    """DDP around each inner model that trains; frozen models are not wrapped."""

    config_class: ClassVar[type] = DDPConfig
    config: DDPConfig
    _averages_afterwards: bool = False

    @classmethod
    def sharding_of(cls, config: DDPConfig, layout: Layout) -> Sharding:
        """Every process holds everything; gradients are all-reduced (reduced and gathered) once in a step.

        The buckets are there from the start, and micro-batches before the last one accumulate beside them.
        """
        return Sharding(
            gradient_copies=2,
            keeps_gradients=True,
            on_host=config.on_host(),
            group=layout.dp_sp_size,
            gathers_per_step=1,
            reduces_per_step=1,
        )

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Wrap a model that trains; the wrapper stays outside the module tree, so parameter names get no prefix."""
        model = super().wrap(name, model)
        if not any(p.requires_grad for p in model.parameters()):
            return model
        # Buffers are rotary tables, equal on every rank: broadcasting them every step would be waste.
        return DistributedDataParallel(
            model,
            device_ids=self.determine_ddp_device_ids(),
            forward_sync_buffers=False,
            bucket_cap_mb=self.config.bucket_cap_mb,
            gradient_as_bucket_view=self.config.gradient_as_bucket_view,
            # Looks for them in the graph of every step, which other models need not pay for.
            find_unused_parameters=bool(model.lacks_gradients),
        )

    def micro_batch(self, name: str, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are averaged once, during the backward pass of the last micro-batch."""
        wrapper = self._wrapped[name]
        assert isinstance(wrapper, DistributedDataParallel), f"{name} does not train"
        return nullcontext() if is_last and not self._averages_afterwards else wrapper.no_sync()

    @property
    def exchanges_within_rows(self) -> bool:
        """Only where rows are cut over ranks; gradients are averaged during the last micro-batch, or afterwards."""
        return bool(self.sequences)

    def reduce_gradients(self, name: str) -> None:
        """Refuse a weight that got no gradient: the buckets of its neighbours were not exchanged either.

        Raises:
            TrainingError: names the weights.
        """
        wrapper = self._wrapped[name]
        assert isinstance(wrapper, DistributedDataParallel), f"{name} does not train"
        if self._averages_afterwards or wrapper.find_unused_parameters:
            return
        lacking = [key for key, weight in self.named_parameters(name) if weight.requires_grad and weight.grad is None]
        if lacking:
            more = f" and {len(lacking) - SHOWN} more" * (len(lacking) > SHOWN)
            raise TrainingError(
                f"the loss gave no gradient to {', '.join(lacking[:SHOWN])}{more} of model {name}, and strategy=ddp "
                "exchanges those of all weights that train. Freeze them (requires_grad_(False)), say "
                "lacks_gradients = True on the model, or use strategy=fsdp2"
            )

    @contextmanager
    def averaged_afterwards(self, name: str) -> Iterator[None]:
        """Average gradients of model ``name`` on exit, in buckets."""
        self._averages_afterwards = True
        try:
            yield
        finally:
            self._averages_afterwards = False
        parameters = [parameter for _, parameter in self.named_parameters(name)]
        fill_missing(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sum_over(gradients, self.mesh.token_group, self.exchange_device, factor=1 / self.layout.world_size)
