"""Tensor parallelism by a model's own plan (transformers' ``base_model_tp_plan``).

The embedding and the head stay whole on every tensor rank: log-probabilities are computed from the head's weight chunk
by chunk, outside of its forward. The entry points of transformers are semi-public, so only this file calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from rlmodule.core.errors import ConfigError

# The matrix of an adapter that is cut with its layer: the second one by columns, the first one by rows, so that the
# adapter's output has the shape of the layer's. The other matrix stays whole and gets the same gradient on every rank.
CUT_OF_ADAPTER = {"colwise": "lora_B", "rowwise": "lora_A"}
KEPT_WHOLE = frozenset({"embed_tokens", "lm_head"})


def apply_tensor_parallel(lm: Any, mesh: DeviceMesh) -> None:
    """Shard the attention and feed-forward matrices of a transformers model over ``mesh``.

    Raises:
        ConfigError: the model has no plan, or ``tp_size`` does not divide its heads.
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
    """The plan of a model, extended to the adapters (peft's) around some of its layers.

    Raises:
        ConfigError: the plan shards a layer with an adapter neither by columns nor by rows.
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
                because=f"the model's plan shards this layer as {style}, and an adapter cannot be sharded that way",
                fix="Use strategy.tp_size=1, or leave the layer out",
            )
        half = f"{name}.{CUT_OF_ADAPTER[style]}"
        for part in (f"{name}.base_layer", *(f"{half}.{adapter}" for adapter, _ in modules[half].named_children())):
            found[part] = style
            found |= {f"{part}.{key}": style for key, _ in modules[part].named_parameters(recurse=False)}
    return found
