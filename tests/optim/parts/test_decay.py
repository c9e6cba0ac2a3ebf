"""Weight decay reaches weights and embeddings, and nothing that has two dimensions for another reason."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlmodule.optim.parts.decay import decayed_parameters


def kinds(model_type, **settings):
    """(endings of the names of parameters of two or more dimensions: those that decay, those that do not)."""
    config = CONFIG_MAPPING[model_type](**settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    decayed = decayed_parameters(model)
    several = {name for name, p in model.named_parameters() if p.ndim >= 2}
    assert decayed <= several, "a vector is never a weight"

    def endings(names):
        return {".".join(name.split(".")[-2:]) for name in names}

    return endings(decayed), endings(several - decayed)


def test_weights_are_named_before_a_strategy_flattens_them():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(4, 2), nn.Conv1d(2, 2, 3))
    assert decayed_parameters(model) == {"0.weight", "2.weight", "3.weight"}


def test_a_layer_with_one_output_is_a_weight():
    """The head of a value function is [1, H]."""
    assert decayed_parameters(nn.Linear(3, 1)) == {"weight"}


# T2A-28 and its kind: model, what does not decay though it has two or more dimensions, one of its weights.
CASES = [
    ("gpt_oss", {}, {"experts.gate_up_proj_bias", "experts.down_proj_bias"}, "experts.gate_up_proj"),
    ("cohere", {"use_qk_norm": True}, {"q_norm.weight", "k_norm.weight"}, "q_proj.weight"),
    ("ernie4_5_moe", {}, {"moe_statics.e_score_correction_bias"}, "gate.weight"),
    ("mamba", {}, {"mixer.A_log"}, "conv1d.weight"),
    ("falcon_mamba", {}, {"mixer.A_log"}, "x_proj.weight"),
    ("jamba", {}, {"mamba.A_log"}, "experts.down_proj"),
    ("zamba", {}, {"mamba.A_log", "mamba.D", "mamba.dt_proj_bias"}, "mamba.x_proj_weight"),
    ("kimi_linear", {}, {"forget_gate.A_log"}, "experts.gate_up_proj"),
    ("recurrent_gemma", {}, {"rg_lru.input_gate_bias", "rg_lru.recurrent_gate_bias"}, "rg_lru.input_gate_weight"),
    (
        "rwkv",
        {},
        {f"attention.time_mix_{x}" for x in ("key", "value", "receptance")}
        | {f"feed_forward.time_mix_{x}" for x in ("key", "receptance")},
        "output.weight",
    ),
    ("gpt2", {}, set(), "c_attn.weight"),
    ("qwen3_next", {}, set(), "conv1d.weight"),
    ("gemma3_text", {}, set(), "embed_tokens.weight"),
    ("deepseek_v3", {}, set(), "kv_a_proj_with_mqa.weight"),
]


@pytest.mark.parametrize(("model_type", "settings", "spared", "weight"), CASES, ids=[case[0] for case in CASES])
def test_t2a_28_no_bias_norm_or_state_decays_whatever_its_dimensions(model_type, settings, spared, weight):
    decayed, others = kinds(model_type, **settings)
    assert others == spared
    assert weight in decayed
