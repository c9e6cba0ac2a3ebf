"""How ranks split the model: heads over sequence ranks."""

from __future__ import annotations

from transformers import PreTrainedConfig

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.models.description import shape_of


def check_layout(hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Refuse a layout that this model cannot have: attention heads are dealt out over sequence ranks.

    Raises:
        ConfigError: names the numbers and what works.
    """
    shape, sp_size = shape_of(hf_config), layout.sp_size
    if sp_size == 1:
        return
    heads, kv_heads = shape.num_heads // layout.tp_size, max(1, shape.num_kv_heads // layout.tp_size)
    fits = [s for s in _divisors(heads) if kv_heads % s == 0 or s % kv_heads == 0]
    if sp_size not in fits:
        raise ConfigError(
            key="strategy.sp_size",
            got=sp_size,
            because=f"num_attention_heads={shape.num_heads} and num_key_value_heads={shape.num_kv_heads} do not split "
            f"over sp_size={sp_size}"
            + (f" after tp_size={layout.tp_size}" if layout.tp_size > 1 else "")
            + ": it must divide the former, and divide or be a multiple of the latter",
            fix=f"Use one of {fits}",
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
