"""What a model must have for a layout: heads for every sequence rank, blocks for every pipeline stage."""

from __future__ import annotations

from transformers import PreTrainedConfig

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout, check_stages
from rlmodule.models.shape import shape_of


def check_layout(hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Check that the heads of every layer split over the sequence ranks, and that every stage has a block.

    Raises:
        ConfigError: names the numbers and what works.
    """
    check_stages(int(hf_config.get_text_config().num_hidden_layers), layout.pp_size)
    if layout.sp_size > 1:
        for heads, kv_heads in sorted({(kind.num_heads, kind.num_kv_heads) for kind in shape_of(hf_config).attention}):
            _check_heads(heads, kv_heads, layout)


def _check_heads(num_heads: int, num_kv_heads: int, layout: Layout) -> None:
    sp_size = layout.sp_size
    heads, kv_heads = num_heads // layout.tp_size, max(1, num_kv_heads // layout.tp_size)
    fits = [s for s in _divisors(heads) if kv_heads % s == 0 or s % kv_heads == 0]
    if sp_size not in fits:
        raise ConfigError(
            key="strategy.sp_size",
            got=sp_size,
            because=f"num_attention_heads={num_heads} and num_key_value_heads={num_kv_heads} do not split "
            f"over sp_size={sp_size}"
            + (f" after tp_size={layout.tp_size}" if layout.tp_size > 1 else "")
            + ": it must divide the former, and divide or be a multiple of the latter",
            fix=f"Use one of {fits}",
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
