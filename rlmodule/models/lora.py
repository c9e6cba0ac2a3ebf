"""Low-rank adapters (arXiv:2106.09685, by peft): the policy trains two thin matrices beside each frozen one.

The reference is the model with its adapter switched off, so it needs no second copy. If ``model.path`` is an adapter
folder, that adapter is merged into its base at load, and the reference keeps it.
Leaves out sharding; adapters are ordinary parameters, and weights are streamed by the names they have in the model with
adapters.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.core.parameters import tied
from rlmodule.models.state_layers import read_past_adapters

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

ALL_LINEAR = "all-linear"
ADAPTER = "default"  # peft's name for the only adapter of a model
ADAPTER_CONFIG = "adapter_config.json"

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters instead of training every weight."""

    r: int = 0  # rank of the adapters; 0 trains every weight
    alpha: int = 16  # an adapter adds alpha / r times its product
    dropout: float = 0.0  # must stay 0: the update has to see the network of the old log-probs
    target_modules: Any = ALL_LINEAR  # all-linear, or a list of module names such as [q_proj,v_proj]
    lr: float | None = None  # peak learning rate of adapters that fits this model; null: by its size
    sft_lr: float | None = None  # likewise for demonstrations; null: by its size

    def __post_init__(self) -> None:
        for name in ("lr", "sft_lr"):
            if getattr(self, name) is not None:
                at_least(f"lora.{name}", getattr(self, name), 0)
        at_least("lora.r", self.r, 0)
        at_least("lora.alpha", self.alpha, 1)
        if self.dropout != 0:
            raise ConfigError(
                key="lora.dropout",
                got=self.dropout,
                because="with it the update sees another network than the one that gave the old log-probabilities, "
                "and random masks depend on how the work is cut",
                fix="Use model.lora.dropout=0.0",
            )

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.r > 0

    @property
    def scaling(self) -> float:
        """Factor on the product of the two matrices."""
        return self.alpha / self.r


def add_adapter(lm: nn.Module, config: LoraConfig, *, seed: int, base: str | None) -> None:
    """Put adapters into ``lm`` in place and freeze the rest; the outputs stay the same until the first update.

    Args:
        lm: causal LM.
        config: rank and the rest.
        seed: of the random half of each adapter; the global random state is left alone.
        base: folder or hub name of the frozen weights; written into an exported adapter.

    Raises:
        DependencyError: peft is not installed.
        ConfigError: no module has such a name.
    """
    peft = _peft()
    adapter = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        target_modules=config.target_modules,
        exclude_modules=list(read_past_adapters(lm)) if config.target_modules == ALL_LINEAR else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ties and of transposed matrices, which ``adapted_weights`` looks at
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(adapter, lm, ADAPTER)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            key="model.lora.target_modules",
            got=config.target_modules,
            because=f"the model has no such modules, or peft cannot adapt them ({str(error).splitlines()[0]})",
            fix=f"Use {ALL_LINEAR}",
        ) from error


@contextmanager
def without_adapter(lm: nn.Module) -> Iterator[None]:
    """Inside, ``lm`` is the model that training started from.

    peft's own switch also toggles ``requires_grad``, which must not change in a sharded model while it runs.
    """
    layers = [m for m in lm.modules() if isinstance(m, _peft().tuners.tuners_utils.BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


@dataclass(frozen=True)
class AdaptedWeight:
    """A frozen weight with an adapter beside it, by the names that the model with adapters has for them.

    Args:
        weight, down, up: names of the weight and of the adapter's two matrices.
        delta: (down, up) -> what the adapter adds to the weight, in its shape.
    """

    weight: str
    down: str
    up: str
    delta: Callable[[Tensor, Tensor], Tensor]


def adapted_weights(lm: nn.Module) -> tuple[AdaptedWeight, ...]:
    """Every adapted weight of a model, each with the way to merge it.

    Raises:
        ConfigError: a module is adapted in a way that cannot be merged, or its weight is another module's, too.
    """
    layers = [(name, m) for name, m in lm.named_modules() if isinstance(m, _peft().tuners.lora.LoraLayer)]
    found = tuple(_adapted_weight(name, layer) for name, layer in layers)
    for names, _ in tied(lm):
        shared = next((one.weight for one in found if one.weight in names and len(names) > 1), None)
        if shared is not None:
            others = ", ".join(plain_name(name) for name in names if name != shared)
            raise _no_merge(plain_name(shared), f"it is one tensor with {others}, which has no adapter")
    return found


def _adapted_weight(name: str, layer: Any) -> AdaptedWeight:
    kinds = _peft().tuners.lora.layer
    if layer.lora_variant or any(layer.lora_bias.values()):
        raise _no_merge(plain_name(name), "its adapter is more than two matrices")
    make = {kinds.Linear: _of_linear, kinds.Embedding: _of_embedding, kinds.ParamWrapper: _of_parameter}.get(
        type(layer)
    )
    if make is None:
        raise _no_merge(plain_name(name), f"peft adapts it as a {type(layer).__name__}")
    return make(name, layer)


def _of_linear(name: str, layer: Any) -> AdaptedWeight:
    """A linear layer, or a Conv1D of GPT-2, which stores its matrix the other way round."""
    delta = partial(_matrix_delta, scaling=layer.scaling[ADAPTER], transposed=layer.fan_in_fan_out)
    down, up = (f"{name}.{part}.{ADAPTER}.weight" for part in ("lora_A", "lora_B"))
    return AdaptedWeight(f"{name}.base_layer.weight", down, up, delta)


def _of_embedding(name: str, layer: Any) -> AdaptedWeight:
    delta = partial(_matrix_delta, scaling=layer.scaling[ADAPTER], transposed=True)
    down, up = (f"{name}.{part}.{ADAPTER}" for part in ("lora_embedding_A", "lora_embedding_B"))
    return AdaptedWeight(f"{name}.base_layer.weight", down, up, delta)


def _of_parameter(name: str, layer: Any) -> AdaptedWeight:
    """One parameter that is not a layer's: the matrices of all experts, or a router's.

    Where a module has several of them, one wrapper lies in the other.
    """
    scaling, num_experts = layer.scaling[ADAPTER], layer.num_experts
    delta = partial(_matrix_delta, scaling=scaling, transposed=False)
    if num_experts > 1:
        out_first = layer._did_swap_in_out_features
        delta = partial(_expert_delta, scaling=scaling, num_experts=num_experts, out_first=out_first)
    down, up = (f"{name}.{part}.{ADAPTER}.weight" for part in ("lora_A", "lora_B"))
    inner, base = f"{name}.base_layer", layer.base_layer
    while isinstance(base, type(layer)):
        inner, base = f"{inner}.base_layer", base.base_layer
    return AdaptedWeight(f"{inner}.{layer.parameter_name}", down, up, delta)


def _matrix_delta(down: Tensor, up: Tensor, *, scaling: float, transposed: bool) -> Tensor:
    """[r, in], [out, r] -> [out, in], or [in, out]."""
    delta = scaling * (up @ down)
    return delta.t() if transposed else delta


def _expert_delta(down: Tensor, up: Tensor, *, scaling: float, num_experts: int, out_first: bool) -> Tensor:
    """[E r, in], expert by expert, and [out, r E], the experts of a rank together -> [E, out, in] or [E, in, out]."""
    down = down.reshape(num_experts, -1, down.shape[-1])  # [E, r, in]
    up = up.reshape(len(up), -1, num_experts).permute(2, 0, 1)  # [E, out, r]
    delta = scaling * (up @ down)
    return delta if out_first else delta.transpose(1, 2)


def _no_merge(module: str, because: str) -> ConfigError:
    return ConfigError(
        key="model.lora.target_modules",
        got=module,
        because=f"{because}, so its adapter could not be merged when the policy is exported",
        fix=f"Leave it out of the list, or use {ALL_LINEAR}",
    )


def plain_name(name: str) -> str:
    """The name that a weight has in the model without adapters."""
    return re.sub(r"\.base_layer(?=\.|$)", "", name)


def merged(weights: Weights, adapted: Iterable[AdaptedWeight]) -> Iterator[tuple[str, Tensor]]:
    """A stream with adapters -> the stream of the plain model, W + scaling * B A in the place of each W.

    Holds one weight until both its adapter matrices have come by.
    """
    parts = {part: one for one in adapted for part in (one.weight, one.down, one.up)}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        one = parts.get(name)
        if one is None:
            yield plain_name(name), tensor
            continue
        found = waiting.setdefault(one.weight, {})
        found[name] = tensor
        if len(found) == 3:
            del waiting[one.weight]
            yield plain_name(one.weight), found[one.weight] + one.delta(found[one.down], found[one.up])
    assert not waiting, f"adapters without all their parts: {sorted(waiting)}"


def adapter_only(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """A stream with adapters -> the adapters alone, under the names peft loads."""
    for name, tensor in weights:
        if ".lora_" in name:
            yield "base_model.model." + re.sub(rf"(\.lora_\w+)\.{ADAPTER}", r"\1", name), tensor


def save_adapter(folder: Path, lm: PreTrainedModel, weights: Weights) -> None:
    """Write a folder that ``PeftModel.from_pretrained`` loads over the base; ``weights`` as ``adapter_only`` yields."""
    folder.mkdir(parents=True, exist_ok=True)
    config: PeftConfig = lm.peft_config[ADAPTER]  # type: ignore[index, assignment]
    config.save_pretrained(str(folder))
    save_file(
        {name: tensor.contiguous() for name, tensor in weights}, folder / "adapter_model.safetensors", {"format": "pt"}
    )


def is_adapter(path: str | None) -> bool:
    """Whether a path is a local folder that holds an adapter instead of a model."""
    return path is not None and os.path.isfile(os.path.join(path, ADAPTER_CONFIG))


def base_of(path: str) -> str:
    """Folder or hub name of a model's weights: the base of an adapter folder, else ``path`` itself."""
    if not is_adapter(path):
        return path
    try:
        base = json.loads((Path(path) / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    except (ValueError, LookupError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise ConfigError(
            key="model.path",
            got=path,
            because=f"the folder holds an adapter, and its {ADAPTER_CONFIG} names no base model",
            fix="Write the base's folder or name into base_model_name_or_path, or merge the adapter first",
        )
    return str(base)


def merge_start(lm: PreTrainedModel, path: str) -> PreTrainedModel:
    """``lm`` with the adapter of a folder merged into its weights, as a plain model.

    Raises:
        ConfigError: the folder lacks a part of the adapter, or holds one that the model has no place for.
    """
    peft = _peft()
    adapter = peft.PeftConfig.from_pretrained(path)
    adapter.inference_mode = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties and of transposed matrices, which peft merges itself
        model = peft.PeftModel(lm, adapter)
        result = model.load_adapter(path, ADAPTER)
    for names, problem in (
        (result.missing_keys, "lacks"),
        (result.unexpected_keys, "holds, for no layer of its base,"),
    ):
        if names:
            raise ConfigError(
                key="model.path",
                got=path,
                because=f"the adapter {problem} {min(names)}",
                fix="Give the whole adapter, and the base it was trained on",
            )
    return model.merge_and_unload()  # type: ignore[no-any-return]


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise DependencyError(package="peft", needed_by="model.lora", extra="lora") from error
    return peft


def check_installed() -> None:
    """Refuse adapters where peft is missing, before a model is loaded.

    Raises:
        DependencyError: names the extra to install.
    """
    _peft()
