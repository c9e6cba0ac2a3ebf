"""A small copy of a model's configuration: the same kinds of layers, few and narrow; all other values stay.

A random model of the copy has some million weights and shows on a CPU, in a fraction of a second, what a model of the
family does: how its layers attend, what its experts do, what lies between its hidden states and its logits. Windows and
other spans of tokens are cut to ``SPAN``, so that samples of a dozen tokens are longer than they.

Leaves out the model that is made of it (``agreement.py``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

LAYERS = 4  # kinds of layers that are kept at most, one layer of each
VOCABULARY = 96  # tokens; those of SPECIAL included
SPAN = 4  # tokens of a window
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FEW_WEIGHTS = 20_000_000  # of a model that a CPU makes and runs in about a second
FIRST_TOKEN = len(SPECIAL)  # from here on ids are ordinary tokens

# Names of values -> the most they may be. Experts chosen per token leave some unchosen.
LIMITS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"(intermediate_size(_mlp)?|ffn_hidden_size|ffn_dim|n_inner|dff|dim_ff|router_hidden_size)$"), 48),
    (re.compile(r"(lora_rank|laurel_rank|gated_norm_rank)$"), 48),
    (re.compile(r"vocab_size"), VOCABULARY),
    (re.compile(r"(sliding_window|window_size|local_attention|chunk_size|index_topk\w*|index_block_size)$"), SPAN),
    (re.compile(r"(num_experts|n_routed_experts|num_local_experts|zero_expert_num)$"), 4),
    (re.compile(r"(experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|n_group|num_expert_group)$"), 2),
    (re.compile(r"topk_group$"), 1),
    (re.compile(r"(first_k_dense_replace|num_dense_layers|num_layers_per_stack)$"), 1),
    (re.compile(r"num_(?!attention)\w+_heads$"), 2),  # key-value heads of layers with a number of their own
    (re.compile(r"n_?groups$"), 2),  # of heads of a state-space layer
    (re.compile(r"(mamba|linear)_num_heads$"), 4),  # of state-space layers as wide as these heads are
)
PER_HEAD = re.compile(r"(\w+_)?num_attention_heads(_per_layer)?$")
AS_WIDE = re.compile(r"dim|size|width|embd|model")  # values that are the hidden size under another name
STATE_HEADS = re.compile(r"(^|_)(n|num)_(\w+_)?heads$")  # of a state-space layer, ``expand`` times as wide as the model
FEW_STATE_HEADS, FEW_WIDTH = 4, 256  # of models without attention heads
PARTS_OF_DEPTH = re.compile(r"n_\w+_layers$")  # numbers of layers that add up to all


def small_copies(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configuration with fewer and narrower layers; then, for families that do not take that, with narrower ones.

    Last comes the configuration itself, if it is small. ``config`` is left alone.
    """
    for fewer_layers in (True, False):
        yield _small(config, fewer_layers)
    if _is_small(config):
        yield copy.deepcopy(config)


def _small(config: PreTrainedConfig, fewer_layers: bool, widths: tuple[int, int] | None = None) -> PreTrainedConfig:
    """``widths``: the hidden size of the configuration around this one, before and after; a part may have it, too."""
    small = copy.deepcopy(config)
    if fewer_layers:
        _keep_one_layer_of_each_kind(small)
    widths = _narrow(small) or widths
    for name, value in _values(small).items():
        limit = next((most for pattern, most in LIMITS if pattern.search(name)), None)
        if isinstance(value, PreTrainedConfig):
            setattr(small, name, _small(value, fewer_layers, widths))
        elif limit is not None:
            setattr(small, name, _at_most(value, limit))
        elif widths is not None and value == widths[0] and _is_number(value) and AS_WIDE.search(name):
            setattr(small, name, widths[1])
    for name, token in SPECIAL.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, token)
    small.__dict__.pop("quantization_config", None)
    return small


def _is_small(config: PreTrainedConfig) -> bool:
    """Whether embedding, head and blocks of the usual kind have ``FEW_WEIGHTS`` at most."""
    text = config.get_text_config()
    width, depth, tokens = (_raw(text, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    if not all(map(_is_number, (width, depth, tokens))):
        return False
    return 2 * tokens * width + 12 * depth * width * width <= FEW_WEIGHTS  # type: ignore[no-any-return]


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    return dict(vars(config))


def _at_most(value: Any, limit: int) -> Any:
    """A positive number, or each of a list, cut to ``limit``; other values stay (0 and below switch things off)."""
    if isinstance(value, list | tuple):
        return [_at_most(one, limit) for one in value]
    return min(value, limit) if _is_number(value) and value > 0 else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _raw(config: PreTrainedConfig, name: str) -> Any:
    """A value by its common name, one number also where layers differ (their own are kept beside it)."""
    return vars(config).get(config.attribute_map.get(name, name))


def _narrow(config: PreTrainedConfig) -> tuple[int, int] | None:
    """At most two key-value heads with two query heads each; the size of a head stays (rotary tables depend on it).

    Returns:
        (hidden size before, after); None where nothing was changed.
    """
    heads, hidden = _raw(config, "num_attention_heads"), _raw(config, "hidden_size")
    if not _is_number(hidden):
        return None
    state_heads = _state_heads(config, hidden)
    if not _is_number(heads):
        config.hidden_size = _width_without_attention(config, hidden, state_heads)
        _narrow_state_heads(config, hidden, state_heads)
        return hidden, config.hidden_size
    size = _raw(config, "head_dim") or hidden // heads
    kv_heads = _raw(config, "num_key_value_heads") or heads
    few = min(kv_heads, 2) * min(heads // kv_heads, 2)
    if few >= heads:
        return None
    for name, value in _values(config).items():
        if PER_HEAD.match(name):
            setattr(config, name, _at_most(value, few))
    config.hidden_size, config.num_attention_heads = min(hidden, few * size), few
    if _raw(config, "num_key_value_heads") is not None:
        config.num_key_value_heads = min(kv_heads, 2)
    _narrow_state_heads(config, hidden, state_heads)
    return hidden, config.hidden_size


def _state_heads(config: PreTrainedConfig, hidden: int) -> str | None:
    """The number of heads of state-space layers that are ``expand`` times as wide as the model; None without such."""
    values = {name: value for name, value in _values(config).items() if _is_number(value)}
    inner = hidden * next((value for name, value in values.items() if name.endswith("expand")), 0)
    sizes = {value for name, value in values.items() if "head" in name}
    for name, value in values.items():
        if STATE_HEADS.search(name) and "attention" not in name and inner and inner // value in sizes:
            return name
    return None


def _width_without_attention(config: PreTrainedConfig, hidden: int, state_heads: str | None) -> int:
    if state_heads is None:
        return min(hidden, FEW_WIDTH)
    heads = int(getattr(config, state_heads))
    return hidden * min(FEW_STATE_HEADS, heads) // heads


def _narrow_state_heads(config: PreTrainedConfig, hidden: int, state_heads: str | None) -> None:
    """As many heads fewer as the model is narrower; their size stays. ``hidden`` is the width before."""
    if state_heads is not None:
        setattr(config, state_heads, getattr(config, state_heads) * config.hidden_size // hidden)


def _keep_one_layer_of_each_kind(config: PreTrainedConfig) -> None:
    """Two layers at least, one of each kind; lists with a value for each layer keep those of the layers that stay."""
    depth: Any = getattr(config, "num_hidden_layers", None)
    if not _is_number(depth) or depth <= 2:
        return
    parts = [name for name in vars(config) if PARTS_OF_DEPTH.match(name)]
    if parts and sum(_raw(config, name) for name in parts) == depth:
        for name in parts:
            setattr(config, name, 1)
        config.num_hidden_layers = len(parts)
        return
    per_layer = {name: v for name, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == depth}
    overrides = _overrides(config)
    kept = _one_of_each([_kind(i, per_layer, overrides) for i in range(depth)])
    if _raw(config, "num_kv_shared_layers"):  # the last layers read keys and values that earlier ones made
        config.num_kv_shared_layers = len(kept)
        kept = [*kept, *kept]
    config.per_layer_config = None
    config.num_hidden_layers = len(kept)
    for name, values in per_layer.items():
        setattr(config, name, [values[i] for i in kept])
    if overrides:
        config.per_layer_config = {new: overrides[old] for new, old in enumerate(kept) if old in overrides}


def _overrides(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Values of single layers that differ from those of all (Gemma 4)."""
    spec: Any = vars(config).get("_heterogeneity_spec")
    return {} if spec is None else copy.deepcopy(spec.per_layer_overrides)


def _kind(layer: int, per_layer: Mapping[str, Sequence[Any]], overrides: Mapping[int, dict[str, Any]]) -> str:
    own = [values[layer] for values in per_layer.values() if not isinstance(values[layer], float)]
    return str((own, overrides.get(layer)))


def _one_of_each(kinds: Sequence[str]) -> list[int]:
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    kept = sorted(first.values())[:LAYERS]
    others = (i for i in range(len(kinds)) if i not in kept)
    while len(kept) < 2:
        kept.append(next(others))
    return sorted(kept)
