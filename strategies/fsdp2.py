"""FSDP2 (torch's fully_shard): parameters sharded over data and sequence ranks, block by block, as DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rlmodule.core.config import at_least, one_of
from rlmodule.core.layout import Layout
from rlmodule.core.parameters import tied
from rlmodule.core.sharding import Sharding, waiting_on_host
from strategies.parts.blocks import DTYPES, blocks_of, bytes_of, fp32_parts, lm_of
from strategies.parts.distributed import OffloadParallelConfig
from strategies.parts.loading import load
from strategies.parts.offload import check_offload_once
from strategies.parts.sharded import ShardedStrategy, full_tensor
from strategies.parts.tensor_parallel import apply_tensor_parallel
from strategies.registry import MODEL_TYPES, STRATEGIES


@dataclass(frozen=True)
class FSDP2Config(OffloadParallelConfig):
    """Config of ``strategy=fsdp2``."""

    tp_size: int = 1  # processes that share every matrix (tensor parallelism, from the model's own plan)
    dp_replicate: int = 1  # copies of the whole sharded model (HSDP); shards stay within one copy
    reshard_after_forward: bool = True  # drop a block's whole weights between forward and backward
    param_dtype: str = "float32"  # dtype weights are gathered and computed in: float32 or bfloat16; masters are float32
    reduce_every_micro_batch: bool = True  # false keeps whole gradients until the last micro-batch and reduces once
    cpu_offload: bool = False  # shards, gradients and optimizer live in host memory

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("tp_size", self.tp_size, 1)
        at_least("dp_replicate", self.dp_replicate, 1)
        one_of("param_dtype", self.param_dtype, DTYPES)
        check_offload_once(self.cpu_offload, self)

    @property
    def grid(self) -> dict[str, int]:
        """Keywords of ``Mesh.of_running``."""
        return {"sp_size": self.sp_size, "tp_size": self.tp_size, "replicas": self.dp_replicate}


@STRATEGIES.register(model_type=MODEL_TYPES, backend="fsdp2", device=["cpu", "cuda", "npu", "xpu"])
class FSDP2Strategy(ShardedStrategy):
    """fully_shard on each block, then on the rest; tensor parallelism from the model's own plan."""

    config_class: ClassVar[type] = FSDP2Config
    config: FSDP2Config

    @classmethod
    def sharding_of(cls, config: FSDP2Config, layout: Layout) -> Sharding:
        """Everything is cut over data and sequence ranks of one copy, matrices over tensor ranks as well."""
        group = layout.dp_sp_size // config.dp_replicate
        return Sharding(
            weights=group * layout.tp_size,
            gradients=(group if config.reduce_every_micro_batch else 1) * layout.tp_size,
            moments=group * layout.tp_size,
            gathered_bytes=bytes_of(config.param_dtype),
            gathers_blocks=True,
            keeps_gathered=not config.reshard_after_forward,
            on_host=waiting_on_host(
                weights=config.cpu_offload,
                gradients=config.cpu_offload,
                moments=config.cpu_offload or config.offload_optimizer,
            ),
            copies_to_sample=True,
            group=group,
            split=layout.tp_size,
            gathers_per_micro_step=2 if config.reshard_after_forward else 1,
            reduces_per_micro_step=1 if config.reduce_every_micro_batch else 0,
            reduces_per_step=0 if config.reduce_every_micro_batch else 1,
        )

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Shard in place: modules keep their names, their parameters become DTensors."""
        self.split_matrices(model)
        reduce: dict[str, Any] = {
            "mesh": self.mesh.sharding,
            "reshard_after_forward": self.config.reshard_after_forward,
            "offload_policy": self._offload_policy(),
        }
        param_dtype = DTYPES[self.config.param_dtype]
        for part in fp32_parts(model, param_dtype):
            load(model, part, self.root_device)
            fully_shard(part, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32), **reduce)
        for block in blocks_of(model):
            load(model, block, self.root_device)
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype, torch.float32), **reduce)
        # The outermost module is given micro-batches: casting its inputs would round old log-probabilities.
        outermost = MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
        load(model, model, self.root_device)
        # Its weights (embedding, head) are needed again at once when backward begins.
        fully_shard(model, mp_policy=outermost, **{**reduce, "reshard_after_forward": False})
        return model

    def split_matrices(self, model: nn.Module) -> None:
        """Split matrices over tensor ranks, before anything is read or sharded."""
        if self.mesh.tensor is not None:
            apply_tensor_parallel(lm_of(model), self.mesh.tensor)

    def _offload_policy(self) -> OffloadPolicy:
        if not self.config.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.root_device.type != "cpu")  # a CPU alone has nothing to lock pages for

    @contextmanager
    def micro_batch(self, name: str, is_last: bool) -> Iterator[None]:
        """Reduce-scatter gradients now, or keep whole ones until the last micro-batch."""
        wrapper = self._wrapped[name]
        assert isinstance(wrapper, FSDPModule)
        wrapper.set_requires_gradient_sync(is_last or self.config.reduce_every_micro_batch)
        wrapper.set_is_last_backward(is_last)
        yield

    @property
    def keeps_matrices(self) -> bool:
        """Shards in host memory cannot be gathered where the processes exchange on another device."""
        return not self.config.cpu_offload

    def local_shards(self, name: str) -> Iterator[Tensor]:
        """Shards only: weights that stayed gathered for a backward pass that never came are dropped first."""
        for module in self._models[name].modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().local_shards(name)

    def full_parameters(self, name: str) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """All-gather one tensor at a time."""
        for names, parameter in tied(self._models[name]):
            yield names, full_tensor(parameter.detach(), self.root_device)
