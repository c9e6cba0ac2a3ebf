"""What every backend shares: it wraps the module's INNER models, one by one, and never the LightningModule itself.

Leaves out how a model is wrapped and what encloses a micro-batch; those are a backend's own few lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from rlmodule.core.contract import Collectives, Layout
from strategies.parts.collectives import LocalCollectives


class InnerModels:
    """Mixin for Lightning strategies: the part of the Strategy contract that does not depend on the backend."""

    layout: Layout = Layout()
    collectives: Collectives = LocalCollectives()
    _models: Mapping[str, nn.Module] = {}
    _wrapped: Mapping[str, nn.Module] = {}

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Wrap each model once; a second set-up of the same models (validate, then fit) keeps the wrappers."""
        if self._models and all(self._models.get(name) is model for name, model in models.items()):
            return
        self._models = dict(models)
        self._wrapped = {name: self.wrap(model) for name, model in models.items()}

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in place of ``model``."""
        return model

    def wrapped(self, name: str) -> nn.Module:
        """The module to call for model ``name``."""
        return self._wrapped[name]

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Nothing to put off where gradients are not exchanged."""
        return nullcontext()

    def clip_and_step(self, optimizer: Optimizer | LightningOptimizer, max_norm: float) -> float:
        """Clip by the global norm (0: no clipping) and step, or skip when the norm is not finite; clears the gradients.

        Gradients are the same on every data rank here, so every rank decides alike.
        """
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = get_total_norm(gradients)
        value = float(norm)
        if torch.isfinite(norm):
            if max_norm > 0:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                clip_grads_with_norm_(parameters, max_norm, norm)
            optimizer.step()
        optimizer.zero_grad()
        return value

    def full_weights(self, name: str, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), one at a time; tied tensors under each of their names."""
        for key, tensor in self._models[name].get_submodule("lm").state_dict().items():
            yield key, tensor.detach().to(dtype=dtype if tensor.is_floating_point() else None)

    @contextmanager
    def train_mode(self, name: str) -> Iterator[None]:
        """Train mode inside, the mode before it afterwards, also on error."""
        with _mode(self._wrapped[name], training=True):
            yield

    @contextmanager
    def eval_mode(self, name: str) -> Iterator[None]:
        """Eval mode without gradients inside, the mode before it afterwards, also on error."""
        with _mode(self._wrapped[name], training=False), torch.no_grad():
            yield


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
