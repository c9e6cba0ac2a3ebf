"""What a model costs, against an independent count: FLOPs of a real forward and backward pass, family by family.

The count runs transformers' own model on a CPU with eager attention, which computes every pair of tokens, and a loop over
experts; the cost model is told the same number of pairs.
"""

# Shared cases: T2A-17.
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import rlmodule.models.shape
from rlmodule.batching.workload import AttentionShape
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.models.description import ModelConfig, load_model_config
from rlmodule.models.shape import shape_of
from rlmodule.run.preflight.layout import check_layout
from tests.helpers.tiny import architecture

# Sizes under the names that families have for them; each takes what it knows.
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "vocab_size": 64,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 256,
    "rotary_dim": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"num_key_value_heads": 4}  # multi-head latent attention has as many keys as queries
ROTARY = {"head_dim": 8, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
SPECIAL = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"), LATENT),
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": ROTARY,
    "hunyuan_v1_moe": {**ROTARY, "num_shared_expert": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {**LATENT, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 48, "head_dim": 8}
    | {"expert_ffn_hidden_size": 24, "zero_expert_num": 2, "moe_topk": 3},
    "gemma3n_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_hidden_layers": 10}
    | {"num_kv_shared_layers": 4, "laurel_rank": 4, "activation_sparsity_pattern": None}
    | {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_hidden_layers": 6}
    | {"head_dim": 8, "global_head_dim": 16},
}
# Their linear attention works on chunks; the first one of a sample costs less, as no state comes into it.
CHUNKED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm3")
DRAWN = ("longcat_flash",)  # how many of a token's experts compute something is a matter of chance
ESTIMATED = ("jetmoe", "longcat_flash")  # their routers look at values, which a pass on the meta device has not
PLAIN = [
    "afmoe",
    "apertus",
    "apertus1p5_text",
    "arcee",
    "aria_text",
    "beam",
    "bitnet",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "diffllama",
    "doge",
    "dory",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "jetmoe",
    "kolibri1",
    "laguna",
    "lfm2",
    "llama",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "minimax_m3_vl_text",
    "ministral3",
    "mistral",
    "mixtral",
    "modernbert-decoder",
    "moshi",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "sarvam_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "starcoder2",
    "vaultgemma",
]


def tiny(family):
    cls = CONFIG_MAPPING[family]
    names = {*cls().to_dict(), *cls.attribute_map, *vars(cls)}
    return cls(**{name: value for name, value in SMALL.items() if name in names} | SPECIAL.get(family, {}))


def counted(config, num_tokens):
    """FLOPs of one forward and backward pass, by PyTorch's own counter."""
    torch.manual_seed(0)
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    ids = torch.randint(3, 60, (1, num_tokens))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    flops = {operator.__name__: number for operator, number in counter.get_flop_counts()["Global"].items()}
    flops.pop("convolution_backward", None)  # the counter takes depthwise convolutions for dense ones
    convolutions = flops.pop("convolution", 0)
    return sum(flops.values()) + 3 * convolutions


def costs(shape, num_tokens):
    """FLOPs with a loss at every token and without a mask."""
    pairs = num_tokens**2
    attention = sum(a.num_layers * a.num_heads * (a.key_dim + a.value_dim) * pairs for a in shape.attention)
    return 6 * ((shape.macs_per_token + shape.macs_per_loss_token) * num_tokens + attention)


@pytest.mark.parametrize("family", [*PLAIN, *SPECIAL, *CHUNKED])
def test_flops_are_those_of_a_real_forward_and_backward_pass(family, monkeypatch):
    if family not in ESTIMATED:
        monkeypatch.delattr(rlmodule.models.shape, "_estimated_shape")
    config = tiny(family)
    num_tokens = 256 if family in (*CHUNKED, *DRAWN) else 32
    assert costs(shape_of(config), num_tokens) == pytest.approx(counted(config, num_tokens), rel=0.02)


LLAMA_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
LLAMA_70B |= {"intermediate_size": 28672, "vocab_size": 128256}
APERTUS_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
APERTUS_8B |= {"intermediate_size": 21504, "vocab_size": 131072}
QWEN3_MOE = {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3_MOE |= {"vocab_size": 151936}
QWEN3_30B = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768}
QWEN3_235B = {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536}


@pytest.mark.parametrize(
    ("family", "settings", "published"),
    [
        ("llama", LLAMA_70B, 70.55e9),  # all of Llama 3.1 70B
        ("apertus", APERTUS_8B, 8.05e9),  # all of Apertus 8B (arXiv:2509.14233)
        ("mixtral", {}, 12.9e9),  # active of Mixtral 8x7B (arXiv:2401.04088)
        ("qwen3_moe", QWEN3_MOE | QWEN3_30B, 3.3e9),  # active of Qwen3-30B-A3B (arXiv:2505.09388)
        ("qwen3_moe", QWEN3_MOE | QWEN3_235B, 22.2e9),  # active of Qwen3-235B-A22B
        ("deepseek_v3", {}, 37e9),  # active of DeepSeek-V3 (arXiv:2412.19437)
    ],
)
def test_weights_of_a_token_are_the_published_numbers(family, settings, published):
    """Published counts hold the embedding, which multiplies nothing and is as large as the head."""
    shape = shape_of(CONFIG_MAPPING[family](**settings))
    assert shape.macs_per_token + 2 * shape.macs_per_loss_token == pytest.approx(published, rel=0.02)


def test_the_largest_models_are_described_without_weights_and_without_random_numbers():
    config = CONFIG_MAPPING["llama"](**LLAMA_70B, rms_norm_eps=1.5e-5)  # a configuration that no other test has read
    before, state, start = config.to_dict(), torch.get_rng_state(), time.process_time()
    shape_of(config)
    assert time.process_time() - start < 5, "every one of 80 layers was run, or weights were made"
    assert torch.equal(torch.get_rng_state(), state)
    assert config.to_dict() == before


def test_layers_are_grouped_by_heads_and_window():
    """Where a family leaves the window to the mask (qwen2_moe), the kind of the layer decides."""
    full = AttentionShape(num_layers=2, num_heads=4, num_kv_heads=2, key_dim=8, value_dim=8)
    windowed = AttentionShape(2, 4, 2, 8, 8, window=4)
    one, one_windowed = AttentionShape(1, 4, 2, 8, 8), AttentionShape(1, 4, 2, 8, 8, window=4)
    expected = {
        "qwen3": {full},
        "mistral": {windowed},
        "gemma2": {one, one_windowed},
        "qwen2_moe": {one, one_windowed},
        "gpt2": {AttentionShape(2, 4, 4, 8, 8)},
    }
    for family, attention in expected.items():
        shape = shape_of(load_model_config(ModelConfig(architecture=architecture(family))))
        assert set(shape.attention) == attention, family


def test_t2a_17_layers_with_heads_of_several_sizes():
    """gemma4_text: of six layers the last sees all tokens, with heads twice as wide."""
    attention = shape_of(tiny("gemma4_text")).attention
    assert [(a.num_layers, a.key_dim, a.value_dim) for a in attention] == [(5, 8, 8), (1, 16, 16)]


def test_t2a_17_sequence_ranks_must_divide_the_heads_of_every_layer():
    config = tiny("gemma4_text")
    check_layout(config, Layout(world_size=2, sp_size=2))
    with pytest.raises(
        ConfigError, match="num_attention_heads=4 and num_key_value_heads=2 do not split over sp_size=3"
    ):
        check_layout(config, Layout(world_size=3, sp_size=3))


@pytest.mark.parametrize(
    ("family", "settings", "inner", "groups", "state", "layers"),
    [
        ("mamba2", {}, 8192, 8, 128, 64),
        ("bamba", {"attn_layer_indices": list(range(0, 32, 4))}, 8192, 1, 256, 24),
        ("falcon_h1", {}, 1024, 1, 256, 32),
    ],
)
def test_a_state_space_multiplies_within_chunks_once_per_group_and_head(family, settings, inner, groups, state, layers):
    """Mamba 2 (arXiv:2405.21060): C with B and its product with x inside a chunk of 256, and x to the state and back."""
    config = CONFIG_MAPPING[family](**settings)
    shape, lm = shape_of(config), rlmodule.models.shape.model_on_meta(config)
    weights = (
        sum(p.numel() for p in lm.base_model.parameters() if p.ndim >= 2) - lm.get_input_embeddings().weight.numel()
    )
    scan = 256 * (state * groups + inner) + 2 * inner * state
    assert shape.macs_per_token == pytest.approx(weights + layers * scan, rel=0.005)
