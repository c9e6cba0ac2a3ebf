"""Tensor parallelism from the plan a model brings along (transformers' ``base_model_tp_plan``).

The embedding and the head stay whole on every tensor rank: log-probabilities are made from the head's weight chunk by
chunk, outside of its forward. transformers' entry points are semi-public, so they are called from here only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from rlmodule.core.errors import ConfigError

# Which matrix of an adapter is cut beside a layer: the second one as columns, the first one as rows, so that the sum of
# both has the shape of what this process has of the layer. What is left whole gets the same gradient everywhere.
CUT_OF_ADAPTER = {"colwise": "lora_B", "rowwise": "lora_A"}
KEPT_WHOLE = frozenset({"embed_tokens", "lm_head"})


def apply_tensor_parallel(lm: Any, mesh: DeviceMesh) -> None:
    """Cut the attention and feed-forward matrices of a transformers model over ``mesh``.

    Raises:
        ConfigError: the model has no plan, or its heads cannot be dealt out.
    """
    text = lm.config.get_text_config()
    for label in ("num_attention_heads", "num_key_value_heads"):
        heads = int(getattr(text, label, None) or text.num_attention_heads)
        if heads % mesh.size():
            raise ConfigError(
                key="strategy.tp_size",
                got=mesh.size(),
                because=f"it does not divide {label}={heads}",
                fix="Use a divisor, or strategy.tp_size=1",
            )
    try:
        plan, _, _ = lm._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    except ValueError as error:
        raise ConfigError(
            key="strategy.tp_size", got=mesh.size(), because=str(error).splitlines()[0], fix="Use strategy.tp_size=1"
        ) from None
    cut = {name: style for name, style in plan.items() if KEPT_WHOLE.isdisjoint(name.split("."))}
    apply_tensor_parallelism(lm, mesh, _with_adapters(lm, cut))


def _with_adapters(lm: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The plan of a plain model, for that model with adapters (peft's) around some of its layers.

    Raises:
        ConfigError: an adapter sits where the plan cuts in a way of its own.
    """
    modules = dict(lm.named_modules())
    found: dict[str, str] = {}
    for name, style in plan.items():
        if f"{name}.base_layer" not in modules:
            found[name] = style
            continue
        if style not in CUT_OF_ADAPTER:
            raise ConfigError(
                key="model.lora.target_modules",
                got=name,
                because=f"the model's plan cuts this layer as {style}, and no adapter can be cut with it",
                fix="Use strategy.tp_size=1, or leave the layer out",
            )
        half = f"{name}.{CUT_OF_ADAPTER[style]}"
        for part in (f"{name}.base_layer", *(f"{half}.{adapter}" for adapter, _ in modules[half].named_children())):
            found[part] = style
            found |= {f"{part}.{key}": style for key, _ in modules[part].named_parameters(recurse=False)}
    return found
