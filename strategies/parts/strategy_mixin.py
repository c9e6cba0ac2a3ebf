"""The part of the Strategy contract that backends share. It wraps the INNER models, never the LightningModule.

Leaves out how a model is wrapped and when gradients are synced: a backend says that in a few lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlmodule.core.contract import Backward, Collectives, ModelObjective, ModelSpec, SequenceRanks
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import Metrics
from rlmodule.core.parameters import Cast, empty_states, fp32_names, tied
from rlmodule.core.sharding import Sharding
from rlmodule.core.types import MicroBatch, StepTotals, TokenOutputs
from strategies.parts.collectives import LocalCollectives
from strategies.parts.failures import on_all_or_none
from strategies.parts.gathering import Casting, Names, as_held
from strategies.parts.loading import drop_unread, load
from strategies.parts.offload import OffloadConfig, Offloaded
from strategies.parts.saved_state import MOMENT, SavedState, read_parts

Item = TypeVar("Item")

HF_PREFIX = "lm."  # the transformers model sits at ``lm``; what comes after it is the Hugging Face name


class StrategyMixin(SavedState):
    """Mixin for Lightning strategies; a backend puts it before Lightning's class.

    It overrides ``wrap`` and, where gradients are exchanged, ``micro_batch`` or ``reduce_gradients``. A backend with a
    schedule of its own overrides ``forward_backward``, ``evaluate`` and ``forward``; one with models of its own
    overrides ``build``.
    """

    layout: Layout = Layout()
    collectives: Collectives = LocalCollectives()
    sequences: Mapping[int, SequenceRanks] = {}  # width of a row -> the ranks that share it with this process
    root_device: torch.device
    offload: OffloadConfig = OffloadConfig()
    _models: Mapping[str, nn.Module] = {}
    _wrapped: Mapping[str, nn.Module] = {}
    _offloaded: Mapping[str, Offloaded] = {}  # parameters of each model
    _moments: Mapping[Optimizer, Offloaded] = {}  # states of each optimizer

    @property
    def gathers_inside_blocks(self) -> bool:
        """Whether it gathers parameters inside a block (ZeRO-3), which rules out selective checkpointing."""
        return False

    @property
    def keeps_matrices(self) -> bool:
        """Whether an optimizer sees each weight with its shape, and can gather it where it is sharded."""
        return True

    @property
    def exchanges_within_rows(self) -> bool:
        """Whether processes wait for each other within one micro-batch; a backend of several that does not says so."""
        return self.layout.world_size > 1

    @property
    def shares_rows(self) -> bool:
        """Whether neighbouring data ranks can share a row where the plan says so: a backend of several says so."""
        return False

    def share_rows(self, most: int, parts: int = 1) -> None:
        """Nothing to share."""
        assert most == 1, f"{type(self).__name__} shares no rows"

    def sequence_of(self, width: int) -> SequenceRanks | None:
        """The ranks that share a row of that width with this process; None for a width of 1."""
        return self.sequences[width] if width > 1 else None

    @classmethod
    def sharding_of(cls, config: Any, layout: Layout) -> Sharding:
        """How a model that trains is spread, for plans; unless a backend says more, every process holds everything."""
        return Sharding()

    @classmethod
    def layout_of(cls, config: Any, world_size: int) -> Layout:
        """The layout of a run of ``world_size`` processes, seen from rank 0, before any process is started."""
        return Layout(world_size)

    def check_model(self, spec: ModelSpec, hf_config: Any) -> None:
        """Nothing: a backend that runs every model of transformers refuses none."""

    def build(self, name: str, spec: ModelSpec) -> nn.Module:
        """The project's model around the Hugging Face one."""
        return spec.build_default()

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Wrap each model once; when the same models are set up again (validate, then fit), the wrappers stay."""
        if self._models and all(self._models.get(name) is model for name, model in models.items()):
            return
        self._models = dict(models)
        for model in models.values():
            model.sequences = self.sequences  # type: ignore[assignment]
        self._wrapped = {name: self.wrap(name, model) for name, model in models.items()}
        if self.offload.offload_params:
            self._offloaded = {name: Offloaded(partial(self.local_shards, name)) for name in models}
            for offloaded in self._offloaded.values():
                offloaded.offload()

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Read the weights of ``model``, move it to the device and return the module to call in its place."""
        load(model, model, self.root_device)
        return model.to(self.root_device)

    def wrapped(self, name: str) -> nn.Module:
        """The module to call for model ``name``."""
        return self._wrapped[name]

    def gather_first_error(self, problem: str | None) -> str | None:
        """The first error message that any process passes in: here that of the only one."""
        return problem

    def gather_from_all(self, item: Item) -> list[Item]:
        """One object of every process: here that of the only one."""
        return [item]

    # ---- training

    def named_parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """(name before sharding, this process's part of it), tied parameters once."""
        yield from self._models[name].named_parameters()

    def forward_backward(
        self,
        name: str,
        micro_batches: Sequence[MicroBatch],
        objective: ModelObjective,
        totals: StepTotals,
        backward: Backward,
    ) -> list[Metrics]:
        """Forward and backward of one micro-batch after the other."""
        model, metrics = self._wrapped[name], list[Metrics]()
        for index, micro_batch in enumerate(micro_batches):
            with self.micro_batch(name, is_last=index == len(micro_batches) - 1):
                loss = objective.for_micro_batch(micro_batch, totals, self.sequence_of(micro_batch.width))
                backward(model(micro_batch, objective=loss))
            metrics.append(loss.metrics)
        self.reduce_gradients(name)
        return metrics

    def reduce_gradients(self, name: str) -> None:
        """Nothing: gradients are exchanged in the backward passes, or not at all."""

    def micro_batch(self, name: str, is_last: bool) -> AbstractContextManager[None]:
        """Encloses forward and backward of one micro-batch; a backend syncs gradients after the last one only."""
        return nullcontext()

    def averaged_afterwards(self, name: str) -> AbstractContextManager[None]:
        """Nothing to average."""
        assert self.layout.world_size == 1, f"{type(self).__name__} does not say how gradients are averaged afterwards"
        return nullcontext()

    def evaluate(
        self, name: str, micro_batches: Sequence[MicroBatch], objective: ModelObjective, totals: StepTotals
    ) -> list[Metrics]:
        """Forward of one micro-batch after the other, for the metrics of its loss."""
        model, metrics = self._wrapped[name], list[Metrics]()
        with self.eval_mode(name):
            for micro_batch in micro_batches:
                loss = objective.for_micro_batch(micro_batch, totals, self.sequence_of(micro_batch.width))
                model(micro_batch, objective=loss)
                metrics.append(loss.metrics)
        return metrics

    def forward(
        self, name: str, micro_batches: Iterable[MicroBatch], outputs: frozenset[str], *, with_adapter: bool = True
    ) -> list[TokenOutputs]:
        """Forward of one micro-batch after the other."""
        options = {} if with_adapter else {"with_adapter": False}  # only a policy with an adapter knows the keyword
        with self.eval_mode(name):
            return [self._wrapped[name](micro_batch, outputs=outputs, **options) for micro_batch in micro_batches]

    def clip_and_step(self, optimizer: Optimizer | LightningOptimizer, max_norm: float) -> float:
        """Clip by the global norm (0: no clipping) and step, or skip when the norm is not finite; clears the gradients.

        The norm is the same number on every rank, so all ranks step or all skip.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = self.grad_norm(parameters)
        if math.isfinite(norm):
            if max_norm > 0:
                scale_gradients(parameters, min(1.0, max_norm / (norm + 1e-6)))
            with self.optimizer_on_device(optimizer, changes=True):
                optimizer.step()
        optimizer.zero_grad()
        return norm

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> float:
        """Global norm of the gradients, all of which this process holds."""
        return math.sqrt(sum_of_squares([p.grad for p in parameters if p.grad is not None]))

    # ---- whole weights

    def full_parameters(self, name: str, cast: Casting = as_held) -> Iterator[tuple[Names, Tensor]]:
        """(all its names before sharding, whole tensor) of each parameter, one at a time; every process calls it.

        ``cast`` turns a tensor, or any part of it, into the type that it is wanted in: parts travel in that type.
        """
        for names, parameter in tied(self._models[name]):
            yield names, cast(names, parameter.detach())

    def full_weights(self, name: str, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), one at a time; tied tensors under each of their names.

        What lies outside of the transformers model (a value head beside it) goes by its own name. What its family keeps
        in float32 (routers of experts) has that type whatever ``dtype`` says.
        """
        cast = Cast(dtype, fp32_names(self._models[name]))
        with self.parameters_on_device(name):
            for names, tensor in self.full_parameters(name, lambda names, part: cast(names[0], part)):
                for full_name in names:
                    yield full_name.removeprefix(HF_PREFIX), tensor
        for key, buffer in persistent_buffers(self.whole_model(name)):
            if key.startswith(HF_PREFIX):
                yield key.removeprefix(HF_PREFIX), cast(key, buffer)

    def whole_model(self, name: str) -> nn.Module:
        """A module with every buffer of model ``name``."""
        return self._models[name]

    def generator(self, name: str) -> nn.Module:
        """The module to sample with inside ``generation_mode``: whole weights, no communication in its forward."""
        return self._models[name]

    def generation_mode(self, name: str, *, keep: bool = False) -> AbstractContextManager[None]:
        """Context with whole weights of model ``name``; each rank may run it as often as it needs to."""
        return self.eval_mode(name)

    @property
    def sampling_ranks(self) -> Collectives | None:
        """None: each rank has a module of its own to sample with."""
        return None

    # ---- modes, and where tensors are meanwhile

    @contextmanager
    def train_mode(self, name: str) -> Iterator[None]:
        """Context in train mode with parameters on the device; undone on exit, also on error.

        Moments are brought to the device by ``clip_and_step`` only.
        """
        with self.parameters_on_device(name, changes=True), _mode(self._wrapped[name], training=True):
            yield

    @contextmanager
    def eval_mode(self, name: str) -> Iterator[None]:
        """Context in eval mode with parameters on the device and no gradients; undone on exit, also on error."""
        with self.parameters_on_device(name), _mode(self._wrapped[name], training=False), torch.no_grad():
            yield

    def parameters_on_device(self, name: str, *, changes: bool = False) -> AbstractContextManager[None]:
        """Context with this rank's parameters on the device; brought there and taken back where offload is on.

        ``changes`` says that they may be written to inside.
        """
        offloaded = self._offloaded.get(name)
        return nullcontext() if offloaded is None else offloaded.on_device(changes=changes)

    def optimizer_on_device(
        self, optimizer: Optimizer | LightningOptimizer, *, changes: bool
    ) -> AbstractContextManager[None]:
        """Context with optimizer states on the device; states that are made inside are offloaded on exit as well."""
        made = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not self.offload.offload_optimizer:
            return nullcontext()
        if made not in self._moments:
            self._moments = {**self._moments, made: Offloaded(partial(states_of, made))}
        return self._moments[made].on_device(changes=changes)

    @contextmanager
    def all_on_device(self, *, changes: bool) -> Iterator[None]:
        """Context with everything that a checkpoint holds on the device."""
        with ExitStack() as stack:
            for name, optimizer in self.models_and_optimizers():
                stack.enter_context(self.parameters_on_device(name, changes=changes))
                stack.enter_context(self.optimizer_on_device(optimizer, changes=changes))
            yield

    def local_shards(self, name: str) -> Iterator[Tensor]:
        """This process's part of each parameter of a model, as plain tensors."""
        return (local(parameter.detach()) for _, parameter in self.named_parameters(name))

    def teardown(self) -> None:
        # Lightning moves every tensor to host memory, which emptied storages do not survive.
        for offloaded in (*self._offloaded.values(), *self._moments.values()):
            offloaded.onload()
        self._offloaded, self._moments = {}, {}
        for model in inner_models_of(self.lightning_module).values():  # type: ignore[attr-defined]
            drop_unread(model)
        super().teardown()  # type: ignore[misc]  # Lightning's, which this is mixed into

    # ---- what a checkpoint holds; see SavedState

    def state_dict_to_save(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """This process's part of a model and its optimizer, by names that do not depend on the strategy.

        Values are what torch.distributed.checkpoint takes: plain tensors or DTensors.
        """
        parts: dict[str, Tensor] = {}
        for key, parameter in self.named_parameters(name):
            parts[f"{name}.{key}"] = parameter.detach()
            for moment, tensor in optimizer.state.get(parameter, {}).items():
                parts[f"{name}.{key}{MOMENT}{moment}"] = tensor
        return parts

    def state_dict_to_load(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """As ``state_dict_to_save``, with moments made where there are none; every tensor is to be filled in place."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = empty_states(group, parameter)
        return self.state_dict_to_save(name, optimizer)

    def load_state_dict(self, name: str, optimizer: Optimizer, parts: Mapping[str, Tensor]) -> None:
        """Drop the states of weights that had none when it was saved; all other tensors were filled in place."""
        for key, parameter in self.named_parameters(name):
            moments = optimizer.state.get(parameter, {})
            if not any(f"{name}.{key}{MOMENT}{moment}" in parts for moment in moments):
                optimizer.state.pop(parameter, None)

    def load_model(self, name: str, folder: Path, trained: frozenset[str] | None = None) -> None:
        """Read the weights of one model from a checkpoint, whichever strategy saved it; every process calls it.

        A frozen weight that it lacks stays as it is: some strategies save only what they train.

        Args:
            name: of the model.
            folder: of the checkpoint.
            trained: parameters that the checkpoint must have; None for those that train here.

        Raises:
            CheckpointError: on every process, when the checkpoint is of another model or one cannot read its part.
        """
        if trained is None:
            trained = frozenset(key for key, p in self.named_parameters(name) if p.requires_grad)
        with self.parameters_on_device(name, changes=True):
            wanted = self.weights_to_load(name)
            may_lack = {key for key in wanted if key.removeprefix(f"{name}.") not in trained}
            self.load_weights(name, on_all_or_none(partial(read_parts, folder, wanted, may_lack=may_lack)))

    def weights_to_load(self, name: str) -> dict[str, Tensor]:
        """This process's part of a model's weights, under the names of a checkpoint, to be filled in place."""
        return {f"{name}.{key}": parameter.detach() for key, parameter in self.named_parameters(name)}

    def load_weights(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Nothing: the tensors were filled in place."""

    def models_and_optimizers(self) -> list[tuple[str, Optimizer]]:
        """Name and optimizer of each model that trains, in the order of ``models``."""
        trainable = [name for name, model in self._models.items() if any(p.requires_grad for p in model.parameters())]
        optimizers: Sequence[Optimizer] = self.optimizers  # type: ignore[attr-defined]
        return list(zip(trainable, optimizers, strict=True))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name before sharding, buffer) of the buffers that belong to a state dict."""
    for place, module in model.named_modules():
        prefix = clean_tensor_name(place)  # FSDP1 puts modules of its own between
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def states_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every state tensor of an optimizer, as plain tensors."""
    return (local(value) for state in optimizer.state.values() for value in state.values())


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Sum over all elements of all tensors, in float64 once each tensor's own norm is taken."""
    if not tensors:
        return 0.0
    norms = torch._foreach_norm(list(tensors))
    return float(torch.stack([n.double() for n in norms]).square().sum())


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply this process's part of the gradients by ``factor``, unless it is 1 or more."""
    if factor < 1.0 and parameters:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def inner_models_of(module: nn.Module | None) -> Mapping[str, nn.Module]:
    """The models that an RLModule hands to its strategy; none where there is no module."""
    found = module.inner_models() if module is not None else {}  # type: ignore[operator]
    assert isinstance(found, Mapping)
    return found


@contextmanager
def _mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, was in before:
            part.training = was
