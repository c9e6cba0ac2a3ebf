"""Tensor parallelism by a model's own plan (transformers' ``base_model_tp_plan``).

The embedding and the head stay whole on every tensor rank: log-probabilities are computed from the head's weight chunk
by chunk, outside of its forward. The entry points of transformers are semi-public, so only this file calls them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from rlmodule.core.errors import ConfigError

# Which matrix of an adapter is split beside a layer: the second one by columns, the first one by rows, so that the sum
# of both has the shape of what this process has of the layer. What is left whole gets the same gradient everywhere.
SPLIT_OF_ADAPTER = {"colwise": "lora_B", "rowwise": "lora_A"}


def apply_tensor_parallel(lm: Any, mesh: DeviceMesh, apart: Collection[str] = ()) -> None:
    """Split the attention and feed-forward matrices of a transformers model over ``mesh``.

    Args:
        lm: the model.
        mesh: processes that share every matrix.
        apart: modules and parameters that are cut in another way (experts).

    Raises:
        ConfigError: the model has no plan, its plan splits no matrix of a block, or its heads cannot be dealt out.
    """
    check_heads(lm.config.get_text_config(), mesh.size())
    try:
        plan, _, _ = lm._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    except ValueError as error:
        raise ConfigError(
            key="strategy.tp_size", got=mesh.size(), because=str(error).splitlines()[0], fix="Use strategy.tp_size=1"
        ) from None
    whole = {lm.get_input_embeddings(), lm.get_output_embeddings()}
    kept = tuple(f"{name}." for name in (*apart, *(name for name, module in lm.named_modules() if module in whole)))
    of_blocks = {name: style for name, style in plan.items() if not f"{name}.".startswith(kept)}
    apply_tensor_parallelism(lm, mesh, _with_adapters(lm, of_blocks))
    if not any(isinstance(parameter, DTensor) for parameter in lm.parameters()):
        raise ConfigError(
            key="strategy.tp_size",
            got=mesh.size(),
            because=f"the plan of {type(lm).__name__} splits nothing but the embedding and the head, which stay whole "
            "here, so every process would hold the whole model",
            fix="Use strategy.tp_size=1",
        )


def check_heads(text: Any, size: int) -> None:
    """Refuse heads that cannot be dealt out to ``size`` tensor ranks; ``text`` is a model's configuration.

    Raises:
        ConfigError: names the key and the number of heads.
    """
    layers = text.per_layer_config if text.is_heterogeneous else [text]
    for label in ("num_attention_heads", "num_key_value_heads"):
        for heads in sorted({int(getattr(layer, label, None) or layer.num_attention_heads) for layer in layers}):
            if heads % size:
                raise ConfigError(
                    key="strategy.tp_size",
                    got=size,
                    because=f"it does not divide {label}={heads}",
                    fix="Use a divisor, or strategy.tp_size=1",
                )


def _with_adapters(lm: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The plan of a model, extended to the adapters (peft's) around some of its layers.

    Raises:
        ConfigError: an adapter sits where the plan splits in a way of its own.
    """
    modules = dict(lm.named_modules())
    found: dict[str, str] = {}
    for name, style in plan.items():
        if f"{name}.base_layer" not in modules:
            found[name] = style
            continue
        if style not in SPLIT_OF_ADAPTER:
            raise ConfigError(
                key="model.lora.target_modules",
                got=name,
                because=f"the model's plan splits this layer as {style}, and no adapter can be split with it",
                fix="Use strategy.tp_size=1, or leave the layer out",
            )
        half = f"{name}.{SPLIT_OF_ADAPTER[style]}"
        for part in (f"{name}.base_layer", *(f"{half}.{adapter}" for adapter, _ in modules[half].named_children())):
            found[part] = style
            found |= {f"{part}.{key}": style for key, _ in modules[part].named_parameters(recurse=False)}
    return found
