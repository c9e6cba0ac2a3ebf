"""DeepSpeed ZeRO: shards optimizer states (stage 1), gradients (2) and parameters (3); one engine per model.

The engine is given our own AdamW, so nothing is compiled, and one accumulation step, so it does not divide the loss,
which is already divided by the totals of the whole mini-batch. The engine clips, and skips steps whose gradients
overflow.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import CheckpointError, ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.parameters import fp32_names, tied
from rlmodule.core.sharding import Sharding, waiting_on_host
from strategies.parts.blocks import (
    DTYPES,
    blocks_of,
    bytes_of,
    check_no_fp32_weights,
    lm_of,
)
from strategies.parts.distributed import ParallelConfig
from strategies.parts.gathered_whole import gather_whole
from strategies.parts.gathering import Casting, Cut, Names, Part, as_held, gathered
from strategies.parts.loading import load
from strategies.parts.saved_state import MOMENT
from strategies.parts.sharded import ShardedStrategy
from strategies.registry import MODEL_TYPES, STRATEGIES

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class DeepSpeedConfig(ParallelConfig):
    """Config of ``strategy=deepspeed``."""

    stage: int = 3  # 1 shards optimizer states, 2 gradients too, 3 parameters too
    param_dtype: str = "float32"  # dtype of the weights in forward and backward: float32 or bfloat16
    offload_optimizer: bool = False  # optimizer states in host memory
    offload_param: bool = False  # parameters in host memory; stage 3 only
    bucket_numel: int = 50_000_000  # elements per reduction
    overlap_comm: bool = False  # reduce while backward runs

    shares_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("param_dtype", self.param_dtype, DTYPES)
        at_least("bucket_numel", self.bucket_numel, 1)
        if self.stage not in (1, 2, 3):
            raise ConfigError(
                key="stage",
                got=self.stage,
                because="ZeRO has stages 1, 2 and 3",
                fix="Use strategy.stage=3, or strategy=ddp",
            )
        if self.offload_param and self.stage != 3:
            raise ConfigError(
                key="offload_param",
                got=True,
                because=f"stage {self.stage} does not shard parameters",
                fix="Use strategy.stage=3",
            )


def load_deepspeed(device: str) -> Any:
    """The package, set up not to compile anything where the device is a CPU."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # it is chosen once, at import
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls torch's collectives by names that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".torch\.distributed\.\w+. is deprecated")
    if device == "cpu":
        # It would compile a shared-memory all-reduce; gloo's is used instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class AsTuple(nn.Module):
    """A model that returns a tuple, since DeepSpeed looks for tensors in tuples only; ``FromTuple`` undoes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        outputs = self.model(*args, **kwargs)
        if isinstance(outputs, Tensor):
            self.kind = None
            return (outputs,)
        self.kind = type(outputs)
        return tuple(getattr(outputs, field.name) for field in fields(outputs))


class FromTuple(nn.Module):
    """An engine that returns what its model returned."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine: Any = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.engine(*args, **kwargs)
        kind = self.engine.module.kind
        return outputs[0] if kind is None else kind(*outputs)


@STRATEGIES.register(model_type=MODEL_TYPES, backend="deepspeed", device=["cpu", "cuda", "npu"])
class DeepSpeedStrategy(ShardedStrategy):
    """One engine per model that trains; at stage 3 also one, without an optimizer, per frozen model."""

    config_class: ClassVar[type] = DeepSpeedConfig
    config: DeepSpeedConfig

    def setup_distributed(self) -> None:
        """Join the process group, which the engines will use."""
        super().setup_distributed()
        self._deepspeed = load_deepspeed(self.root_device.type)
        self._engines: dict[str, Any] = {}
        self._training: Any = None  # engine of the model inside ``micro_batch``

    @property
    def gathers_inside_blocks(self) -> bool:
        """Stage 3 gathers the weights of each layer just before its forward and backward."""
        return self.cuts_parameters

    @property
    def cuts_parameters(self) -> bool:
        """Whether each process holds only a part of the weights."""
        return self.config.stage == 3

    @classmethod
    def sharding_of(cls, config: DeepSpeedConfig, layout: Layout) -> Sharding:
        """Every stage has fp32 masters of its own; stage 3 keeps its share of the gradients twice."""
        group, cuts = layout.dp_sp_size, config.stage == 3
        return Sharding(
            weights=group if cuts else 1,
            gradients=group if config.stage >= 2 else 1,
            moments=group,
            masters=group,
            weight_bytes=bytes_of(config.param_dtype),
            gathered_bytes=bytes_of(config.param_dtype),
            gathers_blocks=cuts,
            gradient_copies=2 if cuts else 1,
            keeps_gradients=cuts,
            bucket_numel=config.bucket_numel,
            on_host=waiting_on_host(weights=config.offload_param, gradients=False, moments=config.offload_optimizer),
            copies_to_sample=cuts,
            group=group,
            gathers_per_micro_step=2 if cuts else 0,
            reduces_per_micro_step=1 if config.stage >= 2 else 0,
            gathers_per_step=0 if cuts else 1,
            reduces_per_step=0 if config.stage >= 2 else 1,
        )

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Engines come later; up to stage 2 every process holds whole weights."""
        names = fp32_names(model, strict=True)
        kept = [name for name, _ in model.named_parameters() if names.search(name)]
        check_no_fp32_weights(kept, DTYPES[self.config.param_dtype])
        if not self.cuts_parameters:
            return super().wrap(name, model)
        classes: tuple[str, ...] = model.state_classes  # type: ignore[assignment]  # a policy or a value model
        gather_whole(model, classes, self._deepspeed.utils.set_z3_leaf_module)
        config = self._engine_config(trained_models=any(p.requires_grad for p in model.parameters()))
        for part in (*blocks_of(model), model):
            load(model, part, self.root_device)
            self._deepspeed.zero.Init(module=part, config_dict_or_path=config)
        return model

    @property
    def keeps_matrices(self) -> bool:
        """Parameters are flat."""
        return False

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the engines: DeepSpeed takes a model together with its optimizer."""
        super().setup_optimizers(trainer)
        if self._engines:
            return
        optimizers = dict(self.models_and_optimizers())
        for name, model in self._models.items():
            if name in optimizers or self.cuts_parameters:
                self._engines[name] = self._engine(model, optimizers.get(name))
        self._wrapped = {**self._wrapped, **{name: FromTuple(engine) for name, engine in self._engines.items()}}

    def _engine(self, model: nn.Module, optimizer: Optimizer | None) -> Any:
        constants = {name: buffer.clone() for name, buffer in model.named_buffers()}
        outermost = AsTuple(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, *_ = self._deepspeed.initialize(
                model=outermost, optimizer=optimizer, config=self._engine_config(optimizer is not None)
            )
        # In bfloat16 the engine rounds buffers as well, which rotary frequencies do not survive.
        for name, buffer in model.named_buffers():
            buffer.data = constants[name].to(buffer.device)
        if self.cuts_parameters:
            # Log-probabilities are computed from the head's weight outside of the head's own forward.
            head = lm_of(model).get_output_embeddings()
            for parameter in () if head is None else head.parameters():
                self._deepspeed.zero.register_external_parameter(outermost, parameter)
        return engine

    def _engine_config(self, trained_models: bool) -> dict[str, Any]:
        config = self.config
        zero: dict[str, Any] = {
            "stage": config.stage,
            "overlap_comm": config.overlap_comm,
            "reduce_bucket_size": config.bucket_numel,
            "allgather_bucket_size": config.bucket_numel,
            "contiguous_gradients": True,
        }
        if config.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": config.bucket_numel}
        if config.offload_optimizer and trained_models:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.root_device.type != "cpu"}
        if config.offload_param:
            zero["offload_param"] = {"device": "cpu", "pin_memory": self.root_device.type != "cpu"}
        bf16 = config.param_dtype == "bfloat16"
        return {
            "train_micro_batch_size_per_gpu": 1,  # required, but micro-batches are ours
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,  # replaced before each step
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": bf16, "check_grad_overflow": True},
            "steps_per_print": 2**31,
        }

    @contextmanager
    def micro_batch(self, name: str, is_last: bool) -> Iterator[None]:
        """Gradients are complete after the last micro-batch; stages 2 and 3 reduce those of each micro-batch."""
        self._training = self._engines[name]
        self._training.set_gradient_accumulation_boundary(is_last)
        yield
        self._training = None

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Backward pass of the engine whose model computed the loss."""
        assert self._training is not None, "backward is called inside micro_batch()"
        assert kwargs.get("gradient") is None, "an engine starts at a scalar loss"
        self._training.backward(closure_loss, scale_wrt_gas=False)
        return closure_loss

    def clip_and_step(self, optimizer: Optimizer | LightningOptimizer, max_norm: float) -> float:
        """The engine clips, then steps or skips; gradients are cleared either way."""
        engine = self._engine_of(optimizer)
        engine.optimizer.clip_grad = max_norm
        optimizer.step()
        return math.inf if engine.optimizer.overflow else float(engine.get_global_grad_norm())

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Lightning counts the step, the engine takes it."""
        closure()
        self._engine_of(optimizer).step()

    def _engine_of(self, optimizer: Optimizer | LightningOptimizer) -> Any:
        wanted = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return next(self._engines[name] for name, made in self.models_and_optimizers() if made is wanted)

    # ---- whole weights

    def full_parameters(self, name: str, cast: Casting = as_held) -> Iterator[tuple[Names, Tensor]]:
        """The fp32 masters of parameters that train, the weights of frozen ones."""
        if self.cuts_parameters:
            yield from gathered(self._part(names, p, cast) for names, p in tied(self._models[name]))
            return
        for names, parameter in tied(self._models[name]):
            master = self._deepspeed.utils.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            yield names, cast(names, parameter.detach().clone() if master is None else master.detach())

    def _part(self, names: Names, parameter: Any, cast: Casting) -> Part:
        """This rank's equal piece of a parameter laid flat; zeros fill up the last one."""
        shard = parameter.ds_tensor
        if parameter.requires_grad:
            shard = self._deepspeed.utils.safe_get_local_fp32_param(parameter)
        cut = Cut(parameter.ds_process_group, dist.get_world_size(parameter.ds_process_group), 0, parameter.ds_numel)
        return Part(names, cast(names, shard.detach().to(self.root_device)), parameter.ds_shape, (cut,))

    def _on_device(self, parameter: nn.Parameter, written_by: int | None = None) -> AbstractContextManager[Any]:
        """Context with the whole parameter; on exit sharded again, with rank ``written_by``'s values where given."""
        if not self.cuts_parameters:
            return nullcontext()
        gathered: AbstractContextManager[Any]
        gathered = self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=written_by)
        return gathered

    def generator(self, name: str) -> nn.Module:
        """A whole copy where parameters are sharded, else the model itself."""
        return super().generator(name) if self.cuts_parameters else self._models[name]

    def generation_mode(self, name: str, *, keep: bool = False) -> AbstractContextManager[None]:
        """Fill the whole copy where parameters are sharded, else eval mode."""
        return super().generation_mode(name, keep=keep) if self.cuts_parameters else self.eval_mode(name)

    # ---- what a checkpoint holds: whole tensors, each written by one rank, so that any strategy can read them

    def state_dict_to_save(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """Whole tensors, each kept by one rank in turn: a rank holds 1/world of model and moments."""
        parts: dict[str, Tensor] = {}
        steps = [state["step"] for state in optimizer.state.values()]
        if steps:
            self._link_moments(name)
        for place, (key, parameter, full_tensor) in enumerate(self._trainable(name)):
            keeps = place % dist.get_world_size() == dist.get_rank()
            read = self._deepspeed.utils.safe_get_full_optimizer_state
            moments = {m: read(parameter, m) for m in MOMENTS} if steps else {}
            if keeps:
                parts[f"{name}.{key}"] = full_tensor.cpu()
                parts |= {f"{name}.{key}{MOMENT}{m}": tensor.cpu() for m, tensor in moments.items()}
                parts |= {f"{name}.{key}{MOMENT}step": steps[0].clone().cpu()} if steps else {}
        return parts

    def state_dict_to_load(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """Whole tensors in host memory, all of them on every rank."""
        parts: dict[str, Tensor] = {}
        for key, _, full_tensor in self._trainable(name):
            parts[f"{name}.{key}"] = torch.zeros_like(full_tensor, device="cpu")
            parts |= {f"{name}.{key}{MOMENT}{m}": torch.zeros_like(full_tensor, device="cpu") for m in MOMENTS}
            parts[f"{name}.{key}{MOMENT}step"] = torch.zeros(())
        return parts

    def load_state_dict(self, name: str, optimizer: Optimizer, parts: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of whole tensors into the engine's masters and moments."""
        steps = [tensor for key, tensor in parts.items() if key.endswith(f"{MOMENT}step")]
        if steps:
            for flat in self._masters(name):
                moments = {m: torch.zeros_like(flat.detach()) for m in MOMENTS}
                optimizer.state[flat] = {"step": steps[0].clone().to(flat.device), **moments}
            self._link_moments(name)
        for key, parameter, _ in self._trainable(name):
            value = parts[f"{name}.{key}"].to(self.root_device)
            self._put_whole(parameter, value)
            with self._on_device(parameter, written_by=0):
                parameter.data.copy_(value)
            if steps:
                for m in MOMENTS:
                    self._put_whole(parameter, parts[f"{name}.{key}{MOMENT}{m}"].to(self.root_device), m)

    def weights_to_load(self, name: str) -> dict[str, Tensor]:
        """Whole tensors in host memory, all of them on every rank."""
        return {f"{name}.{names[0]}": tensor.cpu().clone() for names, tensor in self.full_parameters(name)}

    def load_weights(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Copy whole tensors into frozen parameters.

        Raises:
            CheckpointError: the model trains, and its masters lie with its optimizer.
        """
        for key, parameter in self.named_parameters(name):
            if parameter.requires_grad:
                raise CheckpointError(f"strategy=deepspeed reads {name} together with its optimizer only")
            if f"{name}.{key}" in parts:
                with self._on_device(parameter, written_by=0):
                    parameter.data.copy_(parts[f"{name}.{key}"])

    def _put_whole(self, parameter: nn.Parameter, value: Tensor, *moment: str) -> None:
        """Copy this rank's part of a whole tensor into the fp32 master, or into the moment of that name."""
        utils = self._deepspeed.utils
        if not self.cuts_parameters:
            setter = utils.safe_set_full_optimizer_state if moment else utils.safe_set_full_fp32_param
            setter(parameter, value, *moment)
            return
        # Stage 3 cuts a flat tensor into equal shards, padded with zeros at the end. DeepSpeed's setter for whole
        # tensors does not pad, and fails where the number of processes does not divide the number of elements.
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        flat = torch.nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
        setter = utils.safe_set_local_optimizer_state if moment else utils.safe_set_local_fp32_param
        setter(parameter, flat[size * dist.get_rank() :][:size], *moment)

    def _trainable(self, name: str) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(name, parameter, whole fp32 master) of each parameter that trains, one at a time; all ranks call it."""
        for key, parameter in self.named_parameters(name):
            if parameter.requires_grad:
                yield key, parameter, self._deepspeed.utils.safe_get_full_fp32_param(parameter)

    def _masters(self, name: str) -> list[Tensor]:
        """The flat fp32 shards that the inner optimizer updates."""
        zero = self._engines[name].optimizer
        masters: list[Tensor]
        masters = zero.fp32_partitioned_groups_flat if self.cuts_parameters else zero.single_partition_of_fp32_groups
        return masters

    def _link_moments(self, name: str) -> None:
        """Make stages 1 and 2 look up each parameter's moments again: they look once, before the moments exist."""
        zero = self._engines[name].optimizer
        if not self.cuts_parameters:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
