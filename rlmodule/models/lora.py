"""Low-rank adapters (arXiv:2106.09685, by peft): the policy trains two thin matrices beside each frozen one.

The start of training is the model with its adapter switched off, so a frozen reference needs no second copy. A start
that is an adapter folder itself is merged into its base when it is loaded: the reference then keeps it.
Leaves out how weights are spread; adapters are ordinary parameters, and names of streamed weights are those of the
module with adapters in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError, DependencyError

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

    def __post_init__(self) -> None:
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
    """Put adapters into ``lm`` in place and freeze the rest; the policy is unchanged until the first update.

    Args:
        lm: causal LM.
        config: rank and the rest.
        seed: of the random half of each adapter; the global random state is left alone.
        base: where the frozen weights came from; goes into an exported adapter.

    Raises:
        DependencyError: peft is not installed.
        ConfigError: no module has such a name.
    """
    peft = _peft()
    adapter = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(adapter, lm, ADAPTER)
    except ValueError as error:
        raise ConfigError(
            key="model.lora.target_modules",
            got=config.target_modules,
            because=f"the model has no such modules ({str(error).splitlines()[0]})",
            fix=f"Use {ALL_LINEAR}",
        ) from error


@contextmanager
def without_adapter(lm: nn.Module) -> Iterator[None]:
    """Inside, ``lm`` is the model that training started from.

    peft's own switch also toggles ``requires_grad``, which a sharded model must not see in the middle of a run.
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


def merged(weights: Weights, scaling: float) -> Iterator[tuple[str, Tensor]]:
    """A stream with adapters -> the stream of the plain model, W + scaling * B A in the place of each W.

    Holds one weight until both its adapter matrices have come by.
    """
    waiting: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for name, tensor in weights:
        module, kind = _taken_apart(name)
        if kind is None:
            yield name.replace(".base_layer.", "."), tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[kind] = (name, tensor)
        if len(parts) == 3:
            del waiting[module]
            weight, down, up = parts["weight"][1], parts["lora_A"][1], parts["lora_B"][1]
            yield f"{module}.weight", weight + scaling * (up @ down)
    assert not waiting, f"adapters without all their parts: {sorted(waiting)}"


def adapter_only(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """A stream with adapters -> the adapters alone, under the names peft loads."""
    for name, tensor in weights:
        module, kind = _taken_apart(name)
        if kind in ("lora_A", "lora_B"):
            yield f"base_model.model.{module}.{kind}.weight", tensor


def _taken_apart(name: str) -> tuple[str, str | None]:
    """Name -> (module, which of the three matrices of an adapted layer), or None for every other weight."""
    for kind, ending in (
        ("weight", ".base_layer.weight"),
        ("lora_A", f".lora_A.{ADAPTER}.weight"),
        ("lora_B", f".lora_B.{ADAPTER}.weight"),
    ):
        if name.endswith(ending):
            return name.removesuffix(ending), kind
    return name, None


def save_adapter(folder: Path, lm: PreTrainedModel, weights: Weights) -> None:
    """Write a folder that ``PeftModel.from_pretrained`` loads over the base; ``weights`` come from ``adapter_only``."""
    folder.mkdir(parents=True, exist_ok=True)
    config: PeftConfig = lm.peft_config[ADAPTER]  # type: ignore[index, assignment]
    config.save_pretrained(str(folder))
    save_file(
        {name: tensor.contiguous() for name, tensor in weights}, folder / "adapter_model.safetensors", {"format": "pt"}
    )


def is_adapter(path: str | None) -> bool:
    """Whether a path is a local folder that holds an adapter instead of a model."""
    return path is not None and (Path(path) / ADAPTER_CONFIG).is_file()


def base_of(path: str) -> str:
    """Where the weights of a model live: the base of an adapter folder, and the path itself of anything else."""
    if not is_adapter(path):
        return path
    base = json.loads((Path(path) / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            key="model.path",
            got=path,
            because=f"the folder holds an adapter, and its {ADAPTER_CONFIG} names no base model",
            fix="Write the base's folder or name into base_model_name_or_path, or merge the adapter first",
        )
    return str(base)


def merge_start(lm: PreTrainedModel, path: str) -> PreTrainedModel:
    """``lm`` with the adapter of a folder merged into its weights, as a plain model."""
    return _peft().PeftModel.from_pretrained(lm, path).merge_and_unload()


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
