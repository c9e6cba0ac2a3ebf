"""Small configurations of families whose layers carry a state along a row, and of some that run one sample per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": 64}
_SMALL = {**_SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_DELTA = {  # gated delta rule
    **_SMALL,
    "intermediate_size": 48,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}

# Packed. One of each kind of state: delta rules, state spaces of both kinds, a short convolution; beside attention in
# the same layer or in layers of their own; with and without attention, with and without experts.
HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": dict(_DELTA),
    "qwen3_5_moe_text": {name: v for name, v in {**_DELTA, **_EXPERTS}.items() if name != "intermediate_size"},
    "falcon_h1": {**_SMALL, **_MAMBA, "intermediate_size": 48, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **_SMALL,
        **_MAMBA,
        "intermediate_size": 48,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "logits_scaling": 4.0,
    },
    "bamba": {**_SMALL, **_MAMBA, "intermediate_size": 48, "attn_layer_indices": [1]},
    "lfm2": {
        **_SMALL,
        "intermediate_size": 48,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "jamba": {
        **_SMALL,
        "intermediate_size": 48,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "mamba2": {
        **_SPECIAL,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "kimi_linear": {
        **_SMALL,
        "intermediate_size": 48,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
# Packed, but transformers' own step from one token to the next is off, or its cache is of a class of its own.
READ_AGAIN: Mapping[str, Mapping[str, Any]] = {
    "nemotron_h": {
        **_SMALL,
        "intermediate_size": 48,
        "head_dim": 8,
        "layer_types": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "minimax": {
        **_SMALL,
        "intermediate_size": 48,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 4,
        "num_local_experts": 4,
    },
}
# One sample per row: a state whose layer is told nothing; attention of its own; layers that hand no keywords on.
ALONE: Mapping[str, Mapping[str, Any]] = {
    "mamba": {**_SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4},
    "bloom": {**_SPECIAL, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "nemotron": {**_SMALL, "intermediate_size": 48},
}
# The same, without a cache that could be used.
ALONE_READ_AGAIN: Mapping[str, Mapping[str, Any]] = {
    "rwkv": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64, "eos_token_id": 1},
}
ALL_HYBRIDS = {**HYBRIDS, **READ_AGAIN, **ALONE, **ALONE_READ_AGAIN}
