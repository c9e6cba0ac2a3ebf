"""FSDP1 (torch's FullyShardedDataParallel): flat parameters cut over data and sequence ranks. FSDP2 is the newer one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError
from strategies.parts.blocks import DTYPES, blocks_of
from strategies.parts.processes import Degrees
from strategies.parts.saved_state import MOMENT
from strategies.parts.sharded import ShardedModels
from strategies.registry import STRATEGIES

SHARDING = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


@dataclass(frozen=True)
class FSDPOptions(Degrees):
    """What is kept whole, and in which type it travels."""

    sharding: str = "full"  # full; grad_op keeps weights whole from forward to backward; hybrid shards within a copy
    dp_replicate: int = 1  # copies of the whole sharded model, with sharding=hybrid
    param_dtype: str = "float32"  # type weights are gathered and computed in: float32 or bfloat16; masters stay float32
    reduce_every_micro_batch: bool = True  # false keeps whole gradients until the last micro-batch and reduces once
    cpu_offload: bool = False  # shards, gradients and optimizer live in host memory

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("sharding", self.sharding, SHARDING)
        one_of("param_dtype", self.param_dtype, DTYPES)
        at_least("dp_replicate", self.dp_replicate, 1)
        if (self.dp_replicate > 1) != (self.sharding == "hybrid"):
            raise ConfigError(
                key="dp_replicate",
                got=self.dp_replicate,
                because=f"copies and sharding={self.sharding} do not go together",
                fix="Use strategy.sharding=hybrid with strategy.dp_replicate=2 or more, or neither",
            )
        if self.cpu_offload and not self.reduce_every_micro_batch:
            raise ConfigError(
                key="cpu_offload", got=True, because="gradients that wait for the last micro-batch cannot wait in host memory",
                fix="Use strategy.reduce_every_micro_batch=true",
            )

    @property
    def grid(self) -> dict[str, int]:
        """Keywords of ``Mesh.of_running``."""
        return {"sp_size": self.sp_size, "replicas": self.dp_replicate}


@STRATEGIES.register(model_type="language_model", backend="fsdp", device=["cpu", "cuda", "npu"])
class FSDPStrategy(ShardedModels):
    """One FSDP unit per block, one for what is left; parameters keep their names and their own hyperparameters."""

    options: ClassVar[type] = FSDPOptions
    _options: FSDPOptions

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Cut in place; the outermost wrapper stays outside of the module tree."""
        names = {p: n for n, p in model.named_parameters()}
        self._names = {**getattr(self, "_names", {}), name: names}
        dtype = DTYPES[self._options.param_dtype]
        # Buffers stay fp32: rotary frequencies do not survive rounding. Inputs too: old log-probabilities.
        precision = None if dtype is None else MixedPrecision(dtype, torch.float32, torch.float32, cast_root_forward_inputs=False)
        return FullyShardedDataParallel(
            model,
            device_mesh=self.mesh.sharding,
            sharding_strategy=SHARDING[self._options.sharding],
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks_of(model)}),
            mixed_precision=precision,
            cpu_offload=CPUOffload(self._options.cpu_offload),
            device_id=self.root_device,
            use_orig_params=True,
        )

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Reduce now, or leave whole gradients until the last micro-batch."""
        with ExitStack() as stack:
            if not (is_last or self._options.reduce_every_micro_batch):
                for wrapper in self._wrapped.values():
                    stack.enter_context(wrapper.no_sync())
            yield

    def named_parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's flat piece of each parameter, which may be empty."""
        yield from ((key, parameter) for parameter, key in self._names[name].items())

    def copies_of(self, parameter: nn.Parameter) -> int:
        """A piece is held once in every copy of the sharded model."""
        return self._options.dp_replicate

    def whole_parameters(self, name: str) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Gather one tensor at a time."""
        aliases: dict[str, list[str]] = {}
        for key, first in self._tied[name].items():
            aliases.setdefault(first, []).append(key)
        for key, piece in self._model_state(name).items():
            if key in aliases:
                yield tuple(aliases[key]), piece.to(self.root_device).full_tensor() if isinstance(piece, DTensor) else piece
