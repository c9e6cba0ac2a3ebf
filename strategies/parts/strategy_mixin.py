"""What every backend shares: it wraps the module's INNER models, one by one, and never the LightningModule itself.

Leaves out how a model is wrapped and what encloses a micro-batch; those are a backend's own few lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.optim import Optimizer

from rlmodule.core.contract import Collectives, Layout, SequenceRanks
from rlmodule.core.parameters import Cast, fp32_names, tied
from strategies.parts.collectives import LocalCollectives
from strategies.parts.loading import load
from strategies.parts.offload import OffloadConfig, Offloaded
from strategies.parts.saved_state import SavedState

HF_PREFIX = "lm."  # the transformers model sits at ``lm``; what comes after it is the Hugging Face name


class StrategyMixin(SavedState):
    """Mixin for Lightning strategies: the part of the Strategy contract that does not depend on the backend."""

    layout: Layout = Layout()
    collectives: Collectives = LocalCollectives()
    sequence: SequenceRanks | None = None
    root_device: torch.device
    offload: OffloadConfig = OffloadConfig()
    _models: Mapping[str, nn.Module] = {}
    _wrapped: Mapping[str, nn.Module] = {}
    _offloaded: Mapping[str, Offloaded] = {}  # parameters of each model
    _moments: Mapping[Optimizer, Offloaded] = {}  # states of each optimizer

    @property
    def gathers_inside_blocks(self) -> bool:
        """Whether it runs operations of its own in the middle of a block, other ones forward than backward."""
        return False

    @classmethod
    def layout_of(cls, options: Any, world_size: int) -> Layout:
        """The layout a run will have, known before its processes are started."""
        return Layout(world_size)

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Wrap each model once; a second set-up of the same models (validate, then fit) keeps the wrappers."""
        if self._models and all(self._models.get(name) is model for name, model in models.items()):
            return
        self._models = dict(models)
        for model in models.values():
            model.sequence = self.sequence  # type: ignore[assignment]
        self._wrapped = {name: self.wrap(name, model) for name, model in models.items()}
        if self.offload.offload_params:
            self._offloaded = {name: Offloaded(partial(self.local_shards, name)) for name in models}
            for offloaded in self._offloaded.values():
                offloaded.offload()

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """The module to call in place of ``model``."""
        load(model, model, self.root_device)
        return model.to(self.root_device)

    def wrapped(self, name: str) -> nn.Module:
        """The module to call for model ``name``."""
        return self._wrapped[name]

    def gather_first_error(self, problem: str | None) -> str | None:
        """The first problem that any process has, on every process."""
        return problem

    # ---- training

    def named_parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """(name as before sharding, what this process holds of it), tied ones once."""
        yield from self._models[name].named_parameters()

    def micro_batch(self, name: str, is_last: bool) -> AbstractContextManager[None]:
        """Nothing to put off where gradients are not exchanged."""
        return nullcontext()

    def clip_and_step(self, optimizer: Optimizer | LightningOptimizer, max_norm: float) -> float:
        """Clip by the global norm (0: no clipping) and step, or skip when the norm is not finite; clears the gradients.

        The norm is the same number on every rank, so every rank decides alike.
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
        """Global norm of the gradients; every process holds all of them here."""
        return math.sqrt(sum_of_squares([p.grad for p in parameters if p.grad is not None]))

    # ---- whole weights

    def full_parameters(self, name: str) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """(all its names before sharding, whole tensor) of each parameter, one at a time; every process takes part."""
        for names, parameter in tied(self._models[name]):
            yield names, parameter.detach()

    def full_weights(self, name: str, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), one at a time; tied tensors under each of their names.

        What lies outside of the transformers model (a value head beside it) goes by its own name. What its family keeps
        in float32 (routers of experts) has that type whatever ``dtype`` says.
        """
        cast = Cast(dtype, fp32_names(self._models[name]))
        with self.parameters_on_device(name):
            for names, tensor in self.full_parameters(name):
                tensor = cast(names[0], tensor)
                for full_name in names:
                    yield full_name.removeprefix(HF_PREFIX), tensor
        for key, buffer in persistent_buffers(self._models[name]):
            if key.startswith(HF_PREFIX):
                yield key.removeprefix(HF_PREFIX), cast(key, buffer)

    def generator(self, name: str) -> nn.Module:
        """The module to sample with inside ``generation_mode``: whole weights, no exchange in its forward."""
        return self._models[name]

    def generation_mode(self, name: str) -> AbstractContextManager[None]:
        """Whole weights of model ``name`` at hand inside; ranks may then run it a different number of times each."""
        return self.eval_mode(name)

    # ---- modes, and where tensors are meanwhile

    @contextmanager
    def train_mode(self, name: str) -> Iterator[None]:
        """Train mode and parameters at hand inside, as it was before afterwards, also on error.

        Moments come to the device for the step alone, in ``clip_and_step``.
        """
        with self.parameters_on_device(name, changes=True), _mode(self._wrapped[name], training=True):
            yield

    @contextmanager
    def eval_mode(self, name: str) -> Iterator[None]:
        """Eval mode without gradients and parameters at hand inside, as it was before afterwards, also on error."""
        with self.parameters_on_device(name), _mode(self._wrapped[name], training=False), torch.no_grad():
            yield

    def parameters_on_device(self, name: str, *, changes: bool = False) -> AbstractContextManager[None]:
        """What this process keeps of a model is on the device inside, also where it waits in host memory otherwise."""
        offloaded = self._offloaded.get(name)
        return nullcontext() if offloaded is None else offloaded.on_device(changes=changes)

    def optimizer_on_device(
        self, optimizer: Optimizer | LightningOptimizer, *, changes: bool
    ) -> AbstractContextManager[None]:
        """The same of an optimizer's states, which may be made inside."""
        made = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not self.offload.offload_optimizer:
            return nullcontext()
        if made not in self._moments:
            self._moments = {**self._moments, made: Offloaded(partial(states_of, made))}
        return self._moments[made].on_device(changes=changes)

    @contextmanager
    def all_on_device(self, *, changes: bool) -> Iterator[None]:
        """What a checkpoint holds is on the device inside."""
        with ExitStack() as stack:
            for name, optimizer in self.models_and_optimizers():
                stack.enter_context(self.parameters_on_device(name, changes=changes))
                stack.enter_context(self.optimizer_on_device(optimizer, changes=changes))
            yield

    def local_shards(self, name: str) -> Iterator[Tensor]:
        """What this process keeps of each parameter of a model between passes, as plain tensors."""
        return (local(parameter.detach()) for _, parameter in self.named_parameters(name))

    def teardown(self) -> None:
        """Lightning moves everything to host memory: what waits there has to be on the device for that."""
        for offloaded in (*self._offloaded.values(), *self._moments.values()):
            offloaded.onload()
        self._offloaded, self._moments = {}, {}
        super().teardown()  # type: ignore[misc]  # Lightning's, which this is mixed into

    # ---- what a checkpoint holds; see SavedState

    def state_dict_to_save(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """What this process holds, as torch.distributed.checkpoint wants it, by names that know no strategy."""
        parts: dict[str, Tensor] = {}
        for key, parameter in self.named_parameters(name):
            parts[f"{name}.{key}"] = parameter.detach()
            for moment, tensor in optimizer.state.get(parameter, {}).items():
                parts[f"{name}.{key}@{moment}"] = tensor
        return parts

    def state_dict_to_load(self, name: str, optimizer: Optimizer) -> dict[str, Tensor]:
        """The same, every tensor there is to be filled in place."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter.detach()),
                    "exp_avg_sq": torch.zeros_like(parameter.detach()),
                }
        return self.state_dict_to_save(name, optimizer)

    def load_state_dict(self, name: str, optimizer: Optimizer, parts: Mapping[str, Tensor]) -> None:
        """Parts were filled in place: nothing is left to do."""

    def models_and_optimizers(self) -> list[tuple[str, Optimizer]]:
        """Trainable models with their optimizers, in the order both were made."""
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
    """Everything an optimizer keeps of this process's parameters, as plain tensors."""
    return (local(value) for state in optimizer.state.values() for value in state.values())


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Of all elements, in float64 from each tensor's own norm on."""
    if not tensors:
        return 0.0
    norms = torch._foreach_norm(list(tensors))
    return float(torch.stack([n.double() for n in norms]).square().sum())


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply what this process holds of the gradients."""
    if factor < 1.0 and parameters:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, as a plain one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def inner_models_of(module: nn.Module | None) -> Mapping[str, nn.Module]:
    """What a LightningModule of this project gives to be wrapped."""
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
