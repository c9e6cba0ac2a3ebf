"""Megatron-core: a model rebuilt from its layers, matrices cut over tensor ranks, the vocabulary too.

Every data rank holds the same parameters; their gradients are averaged once per step. Parameters are Megatron's own,
fused ones; weights come and go under Hugging Face names, piece by piece. Sampling and export use the transformers
model. Leaves out the layers (``parts/megatron_trunk.py``), the names (``parts/megatron_names.py``), and moments that
data ranks share (``parts/megatron_optimizer.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from rlmodule.core.config import at_least
from rlmodule.core.contract import Backward, ModelObjective, ModelSpec
from rlmodule.core.devices import detect_vendor
from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import Metrics
from rlmodule.core.parameters import tied
from rlmodule.core.sharding import Sharding
from rlmodule.core.types import MicroBatch, StepTotals
from strategies.parts.adaptors import patch_backend
from strategies.parts.distributed import OffloadParallelConfig
from strategies.parts.gathering import Casting, Names, as_held
from strategies.parts.gradients import fill_missing, sum_over
from strategies.parts.loading import check_finite
from strategies.parts.megatron_api import HAVE_TE, join_groups, on_device
from strategies.parts.megatron_names import (
    Degrees,
    check_model,
    layers_of_stage,
    pieces_of_trunk,
    shares_of_ranks,
    stage_of,
)
from strategies.parts.megatron_optimizer import Moments, SharedMoments
from strategies.parts.megatron_trunk import MegatronTrunk, TrunkPlan
from strategies.parts.pieces import Piece, Pieces, fill
from strategies.parts.pipeline import Pipeline
from strategies.parts.pipelined import PipelinedStrategy
from strategies.parts.saved_state import MOMENT
from strategies.parts.stages import Stage
from strategies.parts.strategy_mixin import HF_PREFIX, local
from strategies.parts.vocabulary import VocabularyGroup
from strategies.registry import MODEL_TYPES, STRATEGIES


@dataclass(frozen=True)
class MegatronConfig(OffloadParallelConfig):
    """Config of ``strategy=megatron``."""

    cp_size: ClassVar[int] = 1  # type: ignore[misc]  # it was not run with parts of rows
    tp_size: int = 1  # processes that share every matrix and the vocabulary
    pp_size: int = 1  # stages that share the layers of a model (pipeline parallelism)
    sequence_parallel: bool = False  # tensor ranks share the positions of a row wherever they share no matrix
    distributed_optimizer: bool = False  # data ranks share the moments, each has those of its part of the weights
    transformer_engine: bool = False  # layers of Transformer Engine, which need CUDA

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("tp_size", self.tp_size, 1)
        at_least("pp_size", self.pp_size, 1)
        if self.sequence_parallel and self.tp_size == 1:
            raise ConfigError(
                key="sequence_parallel",
                got=True,
                because="there are no tensor ranks that could share positions",
                fix="Use strategy.tp_size=2 or more, or strategy.sequence_parallel=false",
            )
        if self.sequence_parallel and self.sp_size > 1:
            raise ConfigError(
                key="sequence_parallel",
                got=True,
                because=f"rows are cut already, over sp_size={self.sp_size} ranks",
                fix="Use strategy.sp_size=1, or strategy.sequence_parallel=false",
            )

    @property
    def grid(self) -> dict[str, int]:
        """Keywords of ``Mesh.of_running``."""
        return {**super().grid, "tp_size": self.tp_size, "pp_size": self.pp_size}


@STRATEGIES.register(model_type=MODEL_TYPES, backend="megatron", device=["cpu", "cuda", "npu"])
class MegatronStrategy(PipelinedStrategy):
    """Puts a ``MegatronTrunk`` in the place of the transformers model."""

    config_class: ClassVar[type] = MegatronConfig
    config: MegatronConfig

    def __init__(self, config: MegatronConfig, *, device: str, num_processes: int, num_nodes: int) -> None:
        if config.transformer_engine and (device != "cuda" or not HAVE_TE):
            raise ConfigError(
                key="strategy.transformer_engine",
                got=True,
                because="Transformer Engine is not installed" if device == "cuda" else f"it has no layers for {device}",
                fix="Use strategy.transformer_engine=false"
                + (", or pip install 'transformer_engine[pytorch]'" if device == "cuda" else ""),
            )
        super().__init__(config, device=device, num_processes=num_processes, num_nodes=num_nodes)
        if config.distributed_optimizer and self.layout_of(config, num_processes * num_nodes).dp_sp_size == 1:
            raise ConfigError(
                key="strategy.distributed_optimizer",
                got=True,
                because="there are no data ranks that could share moments",
                fix="Use strategy.distributed_optimizer=false, or more processes",
            )
        self.device_name = device
        self._copies: dict[Tensor, int] = {}  # processes that hold the same part of each parameter
        self._shared_moments: dict[str, SharedMoments] = {}  # of models that train with the distributed optimizer

    @classmethod
    def sharding_of(cls, config: MegatronConfig, layout: Layout) -> Sharding:
        """Everything is cut over tensor ranks, layers over stages; all of it is the same on every data rank."""
        return Sharding(
            weights=layout.tp_size,
            gradients=layout.tp_size,
            moments=layout.tp_size * (layout.dp_sp_size if config.distributed_optimizer else 1),
            on_host=config.on_host(),
            copies_to_sample=True,
            group=layout.dp_sp_size,
            split=layout.tp_size,
            cuts_vocabulary=True,
            stages=layout.pp_size,
            gathers_per_step=1,
            reduces_per_step=1,
        )

    @property
    def keeps_matrices(self) -> bool:
        """Its parameters are several matrices in one."""
        return False

    # ---- models

    def check_model(self, spec: ModelSpec, hf_config: Any) -> None:
        """Refuse a model that it has no layers for, before any weight is read."""
        config = spec.config
        check_model(hf_config, self._degrees, has_adapters=config.lora.r > 0)
        if self.device_name != "cuda" and config.precision != "32-true":
            raise ConfigError(
                key="model.precision",
                got=config.precision,
                because=f"Megatron's matrices know autocast on CUDA alone, and the device is {self.device_name}",
                fix="Use model.precision=32-true",
            )
        if config.compile:
            raise ConfigError(
                key="model.compile",
                got=True,
                because="strategy=megatron runs Megatron's layers, which are not compiled",
                fix="Use model.compile=false",
            )

    @property
    def _degrees(self) -> Degrees:
        return Degrees(self.config.tp_size, self.config.pp_size, self.config.sequence_parallel)

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Rebuild the transformers model and read its weights, of each tensor this rank's part."""
        lm: Any = model.get_submodule("lm")
        check_model(lm.config, self._degrees, has_adapters=getattr(model, "lora", None) is not None)
        arguments = {"tensor_model_parallel_size": self.config.tp_size, "pipeline_model_parallel_size": 1}
        patch_backend("megatron", self.device_name, detect_vendor(self.device_name), arguments)
        join_groups(self.layout.tp_size)
        whole: Any = self._copies_to_sample[name].model
        trunk = MegatronTrunk(lm, self._plan(lm.config.num_hidden_layers), whole.lm)
        self._read(model, trunk)
        model.lm = trunk
        model.vocabulary = VocabularyGroup.of(self.mesh.tensor, self.exchange_device)  # type: ignore[assignment]
        if self.mesh.pipeline_group is not None:
            self._join_pipeline(name, model, trunk, self.mesh.pipeline_group)
        model.to(self.root_device)
        self._copies |= self._count_copies(name)
        if self.config.distributed_optimizer and next(trunk.parameters()).requires_grad:
            self._shared_moments[name] = self._lay_flat(name, model, trunk)
        return model

    def _lay_flat(self, name: str, model: nn.Module, trunk: MegatronTrunk) -> SharedMoments:
        return SharedMoments(
            model,
            trunk.layer_config,
            self.mesh.token_group,
            self.root_device,
            self.exchange_device,
            next(iter(self._shared(name)), None) if name in self._stages else None,
        )

    def setup_optimizers(self, trainer: Any) -> None:
        """Data ranks get their parts of the weights in the place of weights, where they share moments."""
        super().setup_optimizers(trainer)
        for name, optimizer in self.models_and_optimizers():
            if name in self._shared_moments:
                shared = self._shared_moments[name]
                with self.parameters_on_device(name):
                    shared.attach(optimizer)
                ranks = self.layout.dp_sp_size
                self._copies |= {part: self._copies[p] // ranks for p, part in shared.parts.items()}

    def _plan(self, num_layers: int) -> TrunkPlan:
        stage, stages = self.layout.pp_rank, self.layout.pp_size
        return TrunkPlan(
            tp_size=self.layout.tp_size,
            tp_rank=self.layout.tp_rank,
            layers=layers_of_stage(num_layers, stage, stages),
            is_first=stage == 0,
            is_last=stage == stages - 1,
            sequence_parallel=self.config.sequence_parallel,
            transformer_engine=self.config.transformer_engine,
            device=self.root_device,
        )

    def _read(self, model: nn.Module, trunk: MegatronTrunk) -> None:
        """Give the trunk its numbers.

        Raises:
            TrainingError: on every process, one of them is NaN or infinite.
        """
        held = {key.removeprefix(HF_PREFIX): p for names, p in tied(model) for key in names}
        problem: str | None = None
        try:
            fill(pieces_of_trunk(trunk), partial(_numbers, model, held), self.layout.tp_rank, self.layout.tp_size)
        except TrainingError as error:  # only processes that have the tensor see it
            problem = str(error)
        problem = self.gather_first_error(problem)
        if problem is not None:
            raise TrainingError(problem)

    def _join_pipeline(self, name: str, model: nn.Module, trunk: MegatronTrunk, group: dist.ProcessGroup) -> None:
        """Make the model one stage of a pipeline; what lies beside the transformers model is the last one's."""
        layout, num_layers, width = self.layout, trunk.config.num_hidden_layers, trunk.config.hidden_size
        model.hands_on = not trunk.plan.is_last  # type: ignore[assignment]
        for key, _ in list(model.named_children()):
            if key != "lm" and not trunk.plan.is_last:
                setattr(model, key, nn.Identity())
        first_names = [names[0] for names, _ in self._wholes[name]]
        held_by = {key: stage_of(key.removeprefix(HF_PREFIX), num_layers, layout.pp_size) for key in first_names}
        is_end = trunk.plan.is_first or trunk.plan.is_last
        shared = f"{HF_PREFIX}model.embed_tokens.weight" if trunk.is_tied and is_end else None
        entrance: Any = None if trunk.plan.is_first else trunk
        self._stages[name] = Stage({}, held_by, shared, entrance, width)
        ranks = layout.tp_size if self.config.sequence_parallel else 1

        def shape(micro_batch: MicroBatch) -> tuple[int, ...]:
            return (-(-len(micro_batch.input_ids) // ranks), width)

        self._pipelines[name] = Pipeline(group, shape, self.root_device, self.exchange_device)

    def pieces(self, name: str) -> Iterator[Pieces]:
        """Every parameter of a model with its pieces, by their names before sharding."""
        model = self._models[name]
        for parameter, pieces in pieces_of_trunk(self._trunk(name)):
            yield parameter, tuple(Piece(tuple(HF_PREFIX + n for n in p.names), p.dim, p.view) for p in pieces)
        for key, parameter in model.named_parameters():
            if not key.startswith(HF_PREFIX):
                yield parameter, (Piece((key,)),)

    def _trunk(self, name: str) -> MegatronTrunk:
        trunk = self._models[name].get_submodule("lm")
        assert isinstance(trunk, MegatronTrunk), "wrap has put it there"
        return trunk

    def named_parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """A fused one by the name of its first piece."""
        for parameter, pieces in self.pieces(name):
            yield pieces[0].names[0], parameter

    def full_parameters(self, name: str, cast: Casting = as_held) -> Iterator[tuple[Names, Tensor]]:
        """Put together one tensor at a time by the stage that has it, in the order of the transformers model."""
        here = {piece.names[0]: (parameter, piece) for parameter, pieces in self.pieces(name) for piece in pieces}
        pipeline = self._pipelines.get(name)
        for names, like in self._wholes[name]:
            if pipeline is None:
                parameter, piece = here[names[0]]
                yield names, cast(names, self._gathered(piece, parameter.detach()))
                continue
            holder = self._stages[name].held_by[names[0]]
            if holder == pipeline.rank:
                parameter, piece = here[names[0]]
                tensor = self._gathered(piece, parameter.detach())
            else:
                tensor = torch.empty(like.shape, dtype=like.dtype, device=self.root_device)
            yield names, cast(names, pipeline.broadcast(holder, tensor))

    def _gathered(self, piece: Piece, tensor: Tensor) -> Tensor:
        """The whole tensor on every rank."""
        mine = piece.of(tensor).to(self.exchange_device)
        if piece.dim is None or self.mesh.tensor is None:
            return mine.to(self.root_device)
        parts = [torch.empty_like(mine) for _ in range(self.layout.tp_size)]
        dist.all_gather(parts, mine, group=self.mesh.tensor.get_group())
        return torch.cat(parts, piece.dim).to(self.root_device)

    # ---- gradients

    def forward_backward(
        self,
        name: str,
        micro_batches: Sequence[MicroBatch],
        objective: ModelObjective,
        totals: StepTotals,
        backward: Backward,
    ) -> list[Metrics]:
        """As any other model's; backward passes of Megatron's layers make tensors as well."""
        with on_device(self.root_device):
            return super().forward_backward(name, micro_batches, objective, totals, backward)

    def reduce_gradients(self, name: str) -> None:
        """Add up what tensor ranks have a share of, then average over the ranks that train on tokens of their own."""
        parameters = [p for p, _ in self.pieces(name) if p.requires_grad]
        flat = self._shared_moments.get(name)
        if flat is not None:
            flat.show_gradients()
        fill_missing(parameters)
        if self.mesh.tensor is not None:
            shares = [p.grad for p in shares_of_ranks(self._trunk(name)) if p.grad is not None]
            sum_over(shares, self.mesh.tensor.get_group(), self.exchange_device)
        ranks = self.layout.dp_sp_size
        if flat is not None:
            flat.scatter_gradients()
        elif ranks > 1:
            gradients = [p.grad for p in parameters if p.grad is not None]
            sum_over(gradients, self.mesh.token_group, self.exchange_device, factor=1 / ranks)

    def clip_and_step(self, optimizer: Optimizer | LightningOptimizer, max_norm: float) -> float:
        """As any other optimizer's, of this rank's parts; then ranks bring together what they have updated."""
        made = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        name = next(name for name, known in self.models_and_optimizers() if known is made)
        flat = self._shared_moments.get(name)
        if flat is None:
            return super().clip_and_step(optimizer, max_norm)
        flat.give_gradients()
        norm = super().clip_and_step(optimizer, max_norm)
        flat.gather_parameters()
        flat.clear()
        return norm

    def copies_of(self, parameter: nn.Parameter) -> int:
        """Ranks that train on tokens of their own, tensor ranks where it is not cut, both ends where they share it."""
        return self._copies[parameter]

    def _count_copies(self, name: str) -> dict[Tensor, int]:
        shared = self._stages[name].shared if name in self._stages else None
        copies: dict[Tensor, int] = {}
        for parameter, pieces in self.pieces(name):
            over_tensor = self.layout.tp_size if pieces[0].dim is None else 1
            ends = 2 if pieces[0].names[0] == shared else 1
            copies[parameter] = self.layout.dp_sp_size * over_tensor * ends
        return copies

    # ---- what a checkpoint holds: pieces, which other strategies hold as parameters

    def state_dict_to_save(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """Pieces of weights and moments; those of a fused parameter are copies."""
        shared = self._shared_moments.get(name)
        moments: Any = optimizer.state if shared is None else dict(shared.collected())
        return self._weights(name) | self._moment_parts(name, moments)

    def state_dict_to_load(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """As ``state_dict_to_save``; whole moments on every data rank, also where they share them."""
        shared = self._shared_moments.get(name)
        if shared is None:
            return super().state_dict_to_load(name, optimizer)
        return self._weights(name) | self._moment_parts(name, shared.empty())

    def load_state_dict(self, name: str, optimizer: Optimizer, parts: Mapping[str, Tensor]) -> None:
        """Write pieces of weights and moments to where they belong."""
        self.load_weights(name, parts)
        shared = self._shared_moments.get(name)
        moments: Any = optimizer.state if shared is None else shared.empty()
        for parameter, pieces in self.pieces(name):
            for moment, tensor in moments.get(parameter, {}).items():
                for piece in pieces:
                    with suppress(KeyError):  # it was saved before the first step
                        part = local(parts[f"{name}.{piece.names[0]}{MOMENT}{moment}"])
                        piece.put(tensor, part) if tensor.ndim else tensor.copy_(part)
        if shared is not None:
            shared.put(moments)

    def _moment_parts(self, name: str, moments: Moments) -> dict[str, Tensor]:
        return {
            f"{name}.{piece.names[0]}{MOMENT}{moment}": self._part(piece, tensor) if tensor.ndim else tensor.clone()
            for parameter, pieces in self.pieces(name)
            for moment, tensor in moments.get(parameter, {}).items()
            for piece in pieces
        }

    def weights_to_load(self, name: str) -> dict[str, Tensor]:
        """This process's pieces of a model's weights, to be filled and then given to ``load_weights``."""
        return self._weights(name)

    def load_weights(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Write pieces of weights to where they belong."""
        for parameter, pieces in self.pieces(name):
            for piece in pieces:
                key = f"{name}.{piece.names[0]}"
                if key in parts:
                    piece.put(parameter.data, local(parts[key]))

    def load_model(self, name: str, folder: Path, trained: frozenset[str] | None = None) -> None:
        """Read the weights of one model from a checkpoint; it must have every piece of what trains."""
        if trained is None:
            trained = frozenset(key for parameter, key in self._names(name) if parameter.requires_grad)
        super().load_model(name, folder, trained)

    def _names(self, name: str) -> Iterable[tuple[nn.Parameter, str]]:
        return ((parameter, piece.names[0]) for parameter, pieces in self.pieces(name) for piece in pieces)

    def _weights(self, name: str) -> dict[str, Tensor]:
        return {
            f"{name}.{piece.names[0]}": self._part(piece, parameter.detach())
            for parameter, pieces in self.pieces(name)
            for piece in pieces
        }

    def _part(self, piece: Piece, tensor: Tensor) -> Tensor:
        """A piece as checkpoints take it: cut over tensor ranks or not."""
        mine = piece.of(tensor)
        if self.mesh.tensor is None:
            return mine
        place = Replicate() if piece.dim is None else Shard(piece.dim)
        return DTensor.from_local(mine, self.mesh.tensor, [place], run_check=False)


def _numbers(model: Any, held: Mapping[str, Tensor], name: str) -> Tensor:
    """The whole tensor of a transformers model by its name, from memory or from disk.

    Raises:
        TrainingError: it holds NaN or infinity.
    """
    tensor = held[name].detach()
    where = name
    if tensor.is_meta:
        tensor, where = model.stored.read(HF_PREFIX + name), model.stored.where(HF_PREFIX + name)
    check_finite(where, tensor)
    return tensor
