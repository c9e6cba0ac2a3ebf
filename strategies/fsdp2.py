"""FSDP2 (torch's fully_shard): parameters sharded over data and sequence ranks, block by block, as DTensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rlmodule.core.config import at_least, one_of
from rlmodule.core.contract import Collectives
from rlmodule.core.layout import Layout
from rlmodule.core.sharding import Sharding
from strategies.parts.blocks import DTYPES, blocks_of, bytes_of, fp32_parts, is_small, lm_of, matrices_cast
from strategies.parts.collectives import GroupCollectives
from strategies.parts.distributed import OffloadParallelConfig
from strategies.parts.experts import ExpertMesh, check_expert_degree
from strategies.parts.loading import load
from strategies.parts.offload import check_offload_once
from strategies.parts.pipelined import PipelinedStrategy
from strategies.parts.tensor_parallel import apply_tensor_parallel
from strategies.registry import MODEL_TYPES, STRATEGIES

# What autocast would make of a matrix at each product, once; gradients come out as they would, in bfloat16.
AS_MULTIPLIED = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


@dataclass(frozen=True)
class FSDP2Config(OffloadParallelConfig):
    """Config of ``strategy=fsdp2``."""

    gathers_as_multiplied: ClassVar[bool] = True  # matrices of blocks in bfloat16, where autocast multiplies in it

    pp_size: int = 1  # stages that share the blocks of a model (pipeline parallelism)
    tp_size: int = 1  # processes that share every matrix (tensor parallelism, from the model's own plan)
    ep_size: int = 1  # processes that share the experts of a layer (expert parallelism, from the model's own plan)
    dp_replicate: int = 1  # copies of the whole sharded model (HSDP); shards stay within one copy
    reshard_after_forward: bool = True  # drop a block's whole weights between forward and backward
    keep_weights: bool = False  # keep whole weights over the micro-steps of an optimizer step: each is gathered once
    param_dtype: str = "float32"  # dtype weights are gathered and computed in: float32 or bfloat16; masters are float32
    reduce_every_micro_batch: bool = True  # false keeps whole gradients until the last micro-batch and reduces once
    cpu_offload: bool = False  # shards, gradients and optimizer live in host memory

    shares_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("pp_size", self.pp_size, 1)
        at_least("tp_size", self.tp_size, 1)
        at_least("ep_size", self.ep_size, 1)
        at_least("dp_replicate", self.dp_replicate, 1)
        one_of("param_dtype", self.param_dtype, DTYPES)
        check_offload_once(self.cpu_offload, self)

    @property
    def grid(self) -> dict[str, int]:
        """Keywords of ``Mesh.of_running``."""
        return {
            **super().grid,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "replicas": self.dp_replicate,
        }


@dataclass(frozen=True)
class FewerKeysConfig(FSDP2Config):
    """Keys of fsdp2, less those that no backend on top of it was run with."""

    cp_size: ClassVar[int] = 1  # type: ignore[misc]
    pp_size: ClassVar[int] = 1  # type: ignore[misc]
    ep_size: ClassVar[int] = 1  # type: ignore[misc]
    keep_weights: ClassVar[bool] = False  # type: ignore[misc]
    gathers_as_multiplied: ClassVar[bool] = False
    cpu_offload: ClassVar[bool] = False  # type: ignore[misc]
    shares_rows: ClassVar[bool] = False


@STRATEGIES.register(model_type=MODEL_TYPES, backend="fsdp2", device=["cpu", "cuda", "npu", "xpu"])
class FSDP2Strategy(PipelinedStrategy):
    """fully_shard on each block, then on the rest; tensor parallelism from the model's own plan; pipeline stages."""

    config_class: ClassVar[type] = FSDP2Config
    config: FSDP2Config
    experts: ExpertMesh | None = None  # None where every process has all experts

    def __init__(self, config: FSDP2Config, **place: Any) -> None:
        super().__init__(config, **place)
        world_size = place["num_processes"] * place["num_nodes"]
        processes = world_size // (config.dp_replicate * config.pp_size)
        check_expert_degree(processes, config.ep_size, tp_size=config.tp_size)

    @classmethod
    def layout_of(cls, config: FSDP2Config, world_size: int) -> Layout:  # type: ignore[override]
        """The grid, with the ranks that share experts, which are no dimension of it."""
        return replace(super().layout_of(config, world_size), ep_size=config.ep_size)

    def setup_distributed(self) -> None:
        """Lay the experts' mesh over the same processes."""
        super().setup_distributed()
        self.layout = replace(self.layout, ep_size=self.config.ep_size)
        if self.config.ep_size > 1:
            device, tensor = self.root_device.type, self.mesh.grid["tensor"]
            self.experts = ExpertMesh.of_running(self.layout, device, tensor, replicas=self.config.dp_replicate)

    @classmethod
    def sharding_of(cls, config: FSDP2Config, layout: Layout) -> Sharding:
        """Everything is cut over data and sequence ranks of a copy, matrices over tensor ranks, blocks over stages."""
        group, keeps = layout.dp_sp_size // config.dp_replicate, config.keep_weights
        return Sharding(
            weights=group * layout.tp_size,
            gradients=(group if config.reduce_every_micro_batch else 1) * layout.tp_size,
            moments=group * layout.tp_size,
            gathered_bytes=bytes_of(config.param_dtype),
            gathers_blocks=True,
            casts_matrices=config.gathers_as_multiplied and DTYPES[config.param_dtype] is None,
            keeps_gathered=keeps or not config.reshard_after_forward,
            keeps_outside=True,
            keeps_last_block=True,
            on_host=config.on_host(cpu_offload=config.cpu_offload),
            copies_to_sample=True,
            split_to_sample=layout.tp_size,
            group=group,
            split=layout.tp_size,
            stages=layout.pp_size,
            experts=layout.ep_size,
            gathers_per_micro_step=0 if keeps else 2 if config.reshard_after_forward else 1,
            reduces_per_micro_step=1 if config.reduce_every_micro_batch else 0,
            gathers_per_step=1 if keeps else 0,
            reduces_per_step=0 if config.reduce_every_micro_batch else 1,
        )

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Shard, and say which blocks stay whole until their backward pass: the last one needs its weights at once."""
        super().shard(models)
        for model in models.values():
            blocks = blocks_of(model)
            for module in sharded_in(*(blocks if self.config.keep_weights else blocks[-1:])):
                module.set_reshard_after_forward(False, recurse=False)

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Shard in place: modules keep their names, their parameters become DTensors."""
        param_dtype = DTYPES[self.config.param_dtype]
        self.cut_into_stages(name, model, param_dtype or torch.float32)
        everywhere: dict[str, Any] = {
            "reshard_after_forward": self.config.reshard_after_forward,
            "offload_policy": self._offload_policy(),
        }
        mixed = MixedPrecisionPolicy(param_dtype, torch.float32)
        self._split(model, partial(fully_shard, mp_policy=mixed, **everywhere))
        reduce = {**everywhere, "mesh": self.mesh.sharding}
        for part in fp32_parts(model, param_dtype):
            load(model, part, self.root_device)
            fully_shard(part, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32), **reduce)
        cast = matrices_cast(model, param_dtype) if self.config.gathers_as_multiplied else frozenset()
        for block in blocks_of(model):
            load(model, block, self.root_device)
            matrices = [module for module in block.modules() if module in cast]
            if matrices:  # gathered as they are multiplied; what a block has besides is gathered in fp32
                fully_shard(matrices, mp_policy=AS_MULTIPLIED, **reduce)
            if not is_small(block, matrices):
                fully_shard(block, mp_policy=mixed, **reduce)
        # The outermost module is given micro-batches: casting its inputs would round old log-probabilities.
        outermost = MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
        load(model, model, self.root_device)
        # Its weights (embedding, head) are needed again at once when backward begins.
        fully_shard(model, mp_policy=outermost, **{**reduce, "reshard_after_forward": False})
        return model

    def split_matrices(self, model: nn.Module, apart: Collection[str] = ()) -> None:
        """Split matrices over tensor ranks, those of the modules ``apart`` left out, before anything is sharded."""
        if self.mesh.tensor is not None:
            apply_tensor_parallel(lm_of(model), self.mesh.tensor, apart=apart)

    def split_copy(self, model: nn.Module) -> None:
        """By the model's own plan, but for experts of which every process has all others."""
        if self.mesh.tensor is not None:
            apart = {} if self.experts is None else self.experts.plan(lm_of(model))
            apply_tensor_parallel(lm_of(model), self.mesh.tensor, apart=apart)

    @property
    def sampling_ranks(self) -> Collectives | None:
        """Tensor ranks, which share the copy."""
        return (
            None if self.mesh.tensor is None else GroupCollectives(self.exchange_device, self.mesh.tensor.get_group())
        )

    def _split(self, model: nn.Module, fully_shard_with: Callable[..., object]) -> None:
        """Cut matrices over tensor ranks, and deal out experts, which are read and sharded over a mesh of their own."""
        experts = self.experts
        plan = {} if experts is None else experts.plan(lm_of(model))
        self.split_matrices(model, apart=plan)
        if experts is not None:
            for module in experts.cut(lm_of(model), plan):
                load(model, module, self.root_device)
                experts.shard(module, fully_shard_with)

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
        if self.config.keep_weights:
            wrapper.set_reshard_after_backward(is_last)
        yield

    @contextmanager
    def eval_mode(self, name: str) -> Iterator[None]:
        """Also drop, at the end, whole weights that wait for a backward pass: none comes."""
        with super().eval_mode(name):
            try:
                yield
            finally:
                self._drop_whole_weights(name)

    @property
    def keeps_matrices(self) -> bool:
        """Shards in host memory cannot be gathered where the processes exchange on another device."""
        return not self.config.cpu_offload

    def local_shards(self, name: str) -> Iterator[Tensor]:
        """Shards only: weights that stayed gathered for a backward pass that never came are dropped first."""
        self._drop_whole_weights(name)
        return super().local_shards(name)

    def _drop_whole_weights(self, name: str) -> None:
        for module in sharded_in(self._models[name]):
            module.reshard()


def sharded_in(*modules: nn.Module) -> Iterator[FSDPModule]:
    """The modules of some trees that fully_shard was called on."""
    return (part for module in modules for part in module.modules() if isinstance(part, FSDPModule))
