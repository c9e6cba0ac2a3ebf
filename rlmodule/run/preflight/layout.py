"""What a model must have for a layout: heads for sequence ranks, blocks for stages, experts for those that share."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

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
    if layout.heads_size > 1:
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


def with_parts_for_heads(layout: Layout, models: Iterable[PreTrainedConfig]) -> Layout:
    """The layout in which rows shared by plan have parts where they have more ranks than heads split over.

    Args:
        layout: with ``max_sp_size`` ranks.
        models: of the run, all of which compute the same rows.
    """
    fits = [_sizes_for(kind.num_heads, kind.num_kv_heads) for model in models for kind in shape_of(model).attention]
    by_heads = max(width for width in widths_of(layout.max_sp_size) if all(width in sizes for sizes in fits))
    return replace(layout, max_cp_size=layout.max_sp_size // by_heads)


def _sizes_for(heads: int, kv_heads: int) -> list[int]:
    """Numbers of ranks that can exchange them."""
    return [size for size in _divisors(heads) if kv_heads % size == 0 or size % kv_heads == 0]


def _check_heads(num_heads: int, num_kv_heads: int, layout: Layout) -> None:
    sp_size = layout.heads_size
    fits = _sizes_for(num_heads // layout.tp_size, max(1, num_kv_heads // layout.tp_size))
    if sp_size not in fits:
        raise ConfigError(
            key="strategy.sp_size",
            got=sp_size,
            because=f"num_attention_heads={num_heads} and num_key_value_heads={num_kv_heads} do not split "
            f"over sp_size={sp_size}"
            + (f" after tp_size={layout.tp_size}" if layout.tp_size > 1 else "")
            + ": it must divide the former, and divide or be a multiple of the latter",
            fix=f"Use one of {fits}, and strategy.cp_size for more processes",
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
