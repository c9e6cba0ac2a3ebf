"""A small configuration keeps what decides how a model computes, and nothing of its size."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from rlmodule.models.shrink import SPAN, VOCABULARY, small_copies


def small(model_type: str, **values: Any) -> PreTrainedConfig:
    return next(small_copies(AutoConfig.for_model(model_type, **values)))


def test_one_layer_of_each_kind_stays():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = small("gemma3_text", num_hidden_layers=12, layer_types=kinds * 2)
    assert config.num_hidden_layers == 2
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == SPAN


def test_layers_that_differ_from_all_others_keep_their_values():
    config = small("gemma4_text", head_dim=64, global_head_dim=128)
    sizes = [layer.head_dim for layer in config.per_layer_config]
    assert list(zip(config.layer_types, sizes, strict=True)) == [("sliding_attention", 64), ("full_attention", 128)]


def test_layers_that_share_keys_stay_behind_those_that_make_them():
    config = small("gemma3n_text")
    assert config.num_hidden_layers == 2 * config.num_kv_shared_layers == len(config.intermediate_size)
    assert config.layer_types[:2] == config.layer_types[2:]


def test_groups_of_heads_and_their_size_stay():
    config = small("llama", hidden_size=8192, num_attention_heads=64, num_key_value_heads=8)
    assert (config.num_attention_heads, config.num_key_value_heads, config.hidden_size) == (4, 2, 512)
    alone = small("llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=32)
    assert (alone.num_attention_heads, alone.num_key_value_heads, alone.hidden_size) == (2, 2, 256)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral"])
def test_some_experts_are_left_unchosen(family):
    config = small(family)
    total = getattr(config, "n_routed_experts", None) or config.num_local_experts
    assert (total, config.num_experts_per_tok) == (4, 2)


def test_a_dense_layer_stays_before_those_with_experts():
    config = small("deepseek_v3")
    assert (config.first_k_dense_replace, config.num_hidden_layers) == (1, 2)


def test_numbers_that_are_no_sizes_stay():
    config = small("granite", logits_scaling=7.5, embedding_multiplier=12.0, residual_multiplier=0.22)
    assert (config.logits_scaling, config.embedding_multiplier, config.residual_multiplier) == (7.5, 12.0, 0.22)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32768}
    assert small("qwen3", rope_parameters=rope).rope_parameters["factor"] == 4.0


def test_parts_beside_the_text_shrink_too():
    config = small("gemma3")
    assert config.vision_config.num_hidden_layers == 2
    assert config.vision_config.hidden_size < 300
    assert config.text_config.vocab_size == VOCABULARY


def test_special_tokens_are_in_the_vocabulary_and_the_original_is_left_alone():
    whole = AutoConfig.for_model("llama", vocab_size=128256, bos_token_id=128000, eos_token_id=128001)
    before = whole.to_json_string()
    config = next(small_copies(whole))
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (VOCABULARY, 1, 2)
    assert whole.to_json_string() == before


def test_a_small_model_stays_as_it_is():
    values = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = small("llama", **values, intermediate_size=40, vocab_size=50)
    assert {name: getattr(config, name) for name in values} == values
    assert (config.intermediate_size, config.vocab_size) == (40, 50)


def test_further_copies_are_closer_to_the_original():
    first, second = small_copies(AutoConfig.for_model("llama", num_hidden_layers=16))
    assert (first.num_hidden_layers, second.num_hidden_layers) == (2, 16)
    tiny = AutoConfig.for_model("llama", num_hidden_layers=3, hidden_size=64, num_attention_heads=8, vocab_size=300)
    assert [(c.num_hidden_layers, c.hidden_size) for c in small_copies(tiny)] == [(2, 16), (3, 16), (3, 64)]
