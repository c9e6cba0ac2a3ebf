"""What a model must have for a layout: heads for sequence ranks, blocks for stages, experts for those that share."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedConfig

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout, check_stages, widths_of
from rlmodule.models.experts import numbers_of_experts
from rlmodule.models.shape import model_on_meta, shape_of


def check_layout(hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Check that heads split over sequence ranks, experts over those that share them, and that every stage has a block.

    Raises:
        ConfigError: names the numbers and what works.
    """
    check_stages(int(hf_config.get_text_config().num_hidden_layers), layout.pp_size)
    if max(layout.heads_size, layout.max_sp_size) > 1:
        for heads, kv_heads in sorted({(kind.num_heads, kind.num_kv_heads) for kind in shape_of(hf_config).attention}):
            _check_heads(heads, kv_heads, layout)
    if layout.ep_size > 1:
        _check_experts(numbers_of_experts(model_on_meta(hf_config)), hf_config, layout)


def _check_experts(numbers: Collection[int], hf_config: PreTrainedConfig, layout: Layout) -> None:
    if not numbers:
        raise ConfigError(
            key="strategy.ep_size",
            got=layout.ep_size,
            because=f"{hf_config.model_type} has no experts, or brings no plan to spread them (base_model_ep_plan)",
            fix="Use strategy.ep_size=1",
        )
    for number in sorted(numbers):
        if number % layout.ep_size:
            raise ConfigError(
                key="strategy.ep_size",
                got=layout.ep_size,
                because=f"it does not divide the {number} experts of a layer",
                fix=f"Use one of {_divisors(number)}",
            )


def _check_heads(num_heads: int, num_kv_heads: int, layout: Layout) -> None:
    sp_size = max(layout.heads_size, layout.max_sp_size)
    key = "strategy.sp_size" if layout.max_sp_size == 1 else "batching.max_sp_size"
    heads, kv_heads = num_heads // layout.tp_size, max(1, num_kv_heads // layout.tp_size)
    fits = [s for s in _divisors(heads) if kv_heads % s == 0 or s % kv_heads == 0]
    if sp_size not in fits:
        raise ConfigError(
            key=key,
            got=sp_size,
            because=f"num_attention_heads={num_heads} and num_key_value_heads={num_kv_heads} do not split "
            f"over {key.split('.')[1]}={sp_size}"
            + (f" after tp_size={layout.tp_size}" if layout.tp_size > 1 else "")
            + ": it must divide the former, and divide or be a multiple of the latter",
            fix=f"Use one of {fits}, and strategy.cp_size for more processes"
            if layout.max_sp_size == 1
            else f"Use one of {[size for size in fits if size in widths_of(layout.dp_size)]}",
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
