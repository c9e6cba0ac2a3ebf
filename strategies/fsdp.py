"""FSDP1 (torch's FullyShardedDataParallel): flat parameters sharded over data and sequence ranks. FSDP2 is newer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
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
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE, clean_tensor_name
from torch.optim import Optimizer

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.parameters import tied
from rlmodule.core.sharding import Sharding
from strategies.parts.blocks import DTYPES, blocks_of, bytes_of, fp32_parts
from strategies.parts.distributed import OffloadParallelConfig
from strategies.parts.gathering import Casting, Names, as_held
from strategies.parts.loading import load
from strategies.parts.offload import check_offload_once
from strategies.parts.saved_state import MOMENT
from strategies.parts.sharded import ShardedStrategy
from strategies.parts.strategy_mixin import persistent_buffers
from strategies.registry import MODEL_TYPES, STRATEGIES

SHARDING = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


@dataclass(frozen=True)
class FSDPConfig(OffloadParallelConfig):
    """Config of ``strategy=fsdp``."""

    sharding: str = "full"  # full; grad_op keeps weights whole from forward to backward; hybrid shards within a copy
    dp_replicate: int = 1  # copies of the whole sharded model, with sharding=hybrid
    param_dtype: str = "float32"  # dtype weights are gathered and computed in: float32 or bfloat16; masters are float32
    reduce_every_micro_batch: bool = True  # false keeps whole gradients until the last micro-batch and reduces once
    cpu_offload: bool = False  # shards, gradients and optimizer live in host memory

    shares_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("sharding", self.sharding, SHARDING)
        one_of("param_dtype", self.param_dtype, DTYPES)
        check_offload_once(self.cpu_offload, self)
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
                key="cpu_offload",
                got=True,
                because="gradients that wait for the last micro-batch cannot wait in host memory",
                fix="Use strategy.reduce_every_micro_batch=true",
            )

    @property
    def grid(self) -> dict[str, int]:
        """Keywords of ``Mesh.of_running``."""
        return {**super().grid, "replicas": self.dp_replicate}


@STRATEGIES.register(model_type=MODEL_TYPES, backend="fsdp", device=["cpu", "cuda", "npu"])
class FSDPStrategy(ShardedStrategy):
    """One FSDP unit per block and one for the rest; ``use_orig_params`` keeps names and parameter groups."""

    config_class: ClassVar[type] = FSDPConfig
    config: FSDPConfig

    def __init__(self, config: FSDPConfig, **place: Any) -> None:
        super().__init__(config, **place)
        self._aliases: dict[str, list[tuple[str, ...]]] = {}

    @classmethod
    def sharding_of(cls, config: FSDPConfig, layout: Layout) -> Sharding:
        """Everything is cut over the ranks of one copy; ``grad_op`` keeps gathered weights until backward."""
        group, keeps = layout.dp_sp_size // config.dp_replicate, config.sharding == "grad_op"
        return Sharding(
            weights=group,
            gradients=group if config.reduce_every_micro_batch else 1,
            moments=group,
            gathered_bytes=bytes_of(config.param_dtype),
            keeps_gradients=True,
            gathers_blocks=True,
            keeps_gathered=keeps,
            keeps_outside=True,
            on_host=config.on_host(cpu_offload=config.cpu_offload),
            copies_to_sample=True,
            group=group,
            gathers_per_micro_step=1 if keeps else 2,
            reduces_per_micro_step=1 if config.reduce_every_micro_batch else 0,
            reduces_per_step=0 if config.reduce_every_micro_batch else 1,
        )

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Shard in place; the outermost wrapper stays outside of the module tree."""
        self._aliases[name] = [names for names, _ in tied(model)]
        dtype = DTYPES[self.config.param_dtype]
        # Buffers stay fp32: rotary frequencies do not survive rounding. So do inputs: old log-probabilities.
        precision = (
            None
            if dtype is None
            else MixedPrecision(dtype, torch.float32, torch.float32, cast_root_forward_inputs=False)
        )
        reduce: dict[str, Any] = {
            "device_mesh": self.mesh.sharding,
            "sharding_strategy": SHARDING[self.config.sharding],
            "mixed_precision": precision,
            "cpu_offload": CPUOffload(self.config.cpu_offload and self.root_device.type != "cpu"),
            "device_id": self.root_device,
            "use_orig_params": True,
        }
        places = {module: place for place, module in model.named_modules()}
        _check_adapters(places)
        for part in fp32_parts(model, dtype):
            load(model, part, self.root_device)
            whole = {**reduce, "mixed_precision": None}
            model.set_submodule(places[part], FullyShardedDataParallel(part, **whole))
        for block in reversed(blocks_of(model)):  # innermost first
            load(model, block, self.root_device)
            model.set_submodule(places[block], FullyShardedDataParallel(block, **reduce))
        load(model, model, self.root_device)
        return FullyShardedDataParallel(model, **reduce)

    @property
    def keeps_matrices(self) -> bool:
        """Parameters are flat."""
        return False

    def micro_batch(self, name: str, is_last: bool) -> AbstractContextManager[None]:
        """Reduce-scatter gradients now, or keep whole ones until the last micro-batch."""
        wrapper: Any = self._wrapped[name]
        return nullcontext() if is_last or self.config.reduce_every_micro_batch else wrapper.no_sync()

    def named_parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's flat shard of each parameter; it may be empty."""
        for key, parameter in self._wrapped[name].named_parameters():
            yield clean_tensor_name(key), parameter

    def copies_of(self, parameter: nn.Parameter) -> int:
        """Every copy of the sharded model holds a shard once."""
        return self.config.dp_replicate

    def full_parameters(self, name: str, cast: Casting = as_held) -> Iterator[tuple[Names, Tensor]]:
        """All-gather one unit at a time, as it lies, and copy its tensors."""
        wrapper = self._wrapped[name]
        all_names = {names[0]: names for names in self._aliases[name]}
        for unit, own in units_of(wrapper).items():
            with FullyShardedDataParallel.summon_full_params(
                wrapper.get_submodule(unit), recurse=False, writeback=False
            ):
                whole = dict(self.named_parameters(name))
                for key in own:
                    yield all_names[key], cast(all_names[key], whole[key].detach()).clone()

    def _local_shards(self, name: str) -> dict[str, Tensor]:
        """Name before sharding -> this process's shard as a DTensor."""
        with sharded_state(self._wrapped[name]):
            state = self._wrapped[name].state_dict()
        return {names[0]: state[names[0]] for names in self._aliases[name]}

    # ---- what a checkpoint holds

    def state_dict_to_save(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """FSDP1's own sharded state dicts, under the names that every strategy uses."""
        parts = {f"{name}.{key}": piece for key, piece in self._local_shards(name).items()}
        with sharded_state(self._wrapped[name]):
            state = FullyShardedDataParallel.optim_state_dict(self._wrapped[name], optimizer)["state"]
        for key, moments in state.items():
            parts |= {f"{name}.{key}{MOMENT}{moment}": tensor for moment, tensor in moments.items()}
        return parts

    def load_state_dict(self, name: str, optimizer: Optimizer, parts: Mapping[str, Tensor]) -> None:
        """Load through FSDP1's own sharded state dicts."""
        wrapper: Any = self._wrapped[name]
        loaded = {key.removeprefix(f"{name}."): tensor for key, tensor in parts.items()}
        self._load_shards(name, loaded)
        state: dict[str, dict[str, Tensor]] = {}
        for key, tensor in loaded.items():
            if MOMENT in key:
                parameter, _, moment = key.partition(MOMENT)
                state.setdefault(parameter, {})[moment] = tensor
        with sharded_state(wrapper):
            if state:
                now = FullyShardedDataParallel.optim_state_dict(wrapper, optimizer)
                now["state"] = state
                optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(wrapper, optimizer, now))

    def weights_to_load(self, name: str) -> dict[str, Tensor]:
        """FSDP1's own sharded state dict."""
        return {f"{name}.{key}": piece for key, piece in self._local_shards(name).items()}

    def load_weights(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Load through FSDP1's own sharded state dict."""
        whole = {**self._local_shards(name), **{key.removeprefix(f"{name}."): piece for key, piece in parts.items()}}
        self._load_shards(name, whole)

    def _load_shards(self, name: str, shards: Mapping[str, Tensor]) -> None:
        model = {alias: shards[names[0]] for names in self._aliases[name] for alias in names}
        with sharded_state(self._wrapped[name]):
            self._wrapped[name].load_state_dict({**dict(persistent_buffers(self._models[name])), **model})


def units_of(wrapper: nn.Module) -> dict[str, list[str]]:
    """Place of each FSDP unit -> names before sharding of the parameters that it gathers."""
    found: dict[str, list[str]] = {}
    for key, _ in wrapper.named_parameters():
        unit, _, _ = key.rpartition(f".{FSDP_WRAPPED_MODULE}.")
        found.setdefault(unit, []).append(clean_tensor_name(key))
    return found


def _check_adapters(places: Mapping[nn.Module, str]) -> None:
    """Refuse adapters of fused experts: peft adds them to the weights in forward, and flat parameters are views.

    Raises:
        ConfigError: names the first of them.
    """
    name = next((place for module, place in places.items() if type(module).__name__ == "ParamWrapper"), None)
    if name is not None:
        raise ConfigError(
            key="strategy",
            got="fsdp",
            because=f"{name} has an adapter beside a parameter that is no layer's, and FSDP1 cannot train those",
            fix="Use strategy=fsdp2, or list other layers in model.lora.target_modules",
        )


@contextmanager
def sharded_state(wrapper: nn.Module) -> Iterator[None]:
    """Inside, state dicts hold shards as DTensors on their device: copies in host memory alias freed storage on CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated and warns each time
        with FullyShardedDataParallel.state_dict_type(
            wrapper,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        ):
            yield
