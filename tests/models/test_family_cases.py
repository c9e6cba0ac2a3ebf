"""Cases of public reports about model families, by id: what each family computes, or the words it is refused with."""

# Shared cases: T2A-01, T2A-03, T2A-05, T2A-07, T2A-08, T2A-11, T2A-12, T2A-15, T2A-17, T2A-19, T2A-21, T2A-23, T2A-31, T2A-33, T2A-34, T2A-35, T2A-36.

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlmodule.batching.collate import pack_rows
from rlmodule.core.errors import ConfigError
from rlmodule.core.parameters import Cast, fp32_names
from rlmodule.core.types import StepTotals
from rlmodule.models.agreement import Agreement, compare
from rlmodule.models.alone import RowMode
from rlmodule.models.building import build_policy, build_policy_on_meta, check_family, save_pretrained, small_models
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig, load_model_config, positions_in_words, positions_of
from rlmodule.models.lora import LoraConfig, merged
from rlmodule.models.output_head import OutputHead
from rlmodule.models.policy import PolicyModel
from rlmodule.models.reading import LOGPROBS
from rlmodule.models.value import build_value_model, build_value_model_on_meta
from tests.helpers.tiny import FAMILIES, architecture, mixed_rows, row, sample, single, stock_scores, tiny_policy
from tests.models.test_attention import prefill

# peft 0.21 asks transformers 5.24 by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOTALS = StepTotals(tokens=1000, sequences=8)
ROWS = mixed_rows()
FILE = "model.safetensors"
SMALL = FAMILIES["llama"]
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}


def refusal(model_type: str, lora: LoraConfig | None = None, **values: Any) -> ConfigError:
    """What a model is refused with."""
    config = ModelConfig(architecture={"model_type": model_type, **values}, lora=lora or LoraConfig())
    with pytest.raises(ConfigError) as caught:
        build_policy(config, seed=0, temperature=1.0)
    return caught.value


def family_of(model_type: str, **values: Any) -> Agreement:
    """How a family is computed; it is not refused."""
    config = ModelConfig(architecture={"model_type": model_type, **values})
    return check_family(load_model_config(config), config)


def adapted(family: str, lora: LoraConfig, **changes: Any) -> PolicyModel:
    """A tiny policy with adapters that are far from nothing."""
    config = ModelConfig(architecture=architecture(family, **changes), lora=lora)
    policy = build_policy(config, seed=0, temperature=1.0)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.normal_(0, 0.05 if ".lora_" in name else 0.15, generator=rng)
    return policy


def eager(lm: Any) -> Any:
    """A copy of the model, adapters and all, with transformers' own attention."""
    lm = copy.deepcopy(lm)
    lm.set_attn_implementation("eager")
    return lm.eval()


def own_scores(lm: Any) -> Tensor:
    """[N] log-probabilities of all response tokens by the model's own forward, one sample per pass."""
    parts = []
    for item in ROWS:
        prompt = torch.tensor(item.sample.prompt.ids)
        logits = lm(input_ids=torch.cat([prompt, item.sample.response_ids])[None], use_cache=False).logits[0]
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        parts.append(scores.gather(-1, item.sample.response_ids[:, None])[:, 0][item.sample.loss_mask])
    return torch.cat(parts)


def exported_scores(policy: PolicyModel, folder: Any) -> Tensor:
    """The same of the folder that the policy is exported to, merged."""
    weights = dict(merged(single({"policy": policy}).full_weights("policy"), policy.adapted))
    save_pretrained(folder, policy.lm, byte_tokenizer(), weights)
    return own_scores(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


# ---- what lies between the last hidden states and the logits


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("hyperclovax", {"logits_scaling": 0.25}, OutputHead(scale=0.25)),
        ("granite", {"logits_scaling": 4.0}, OutputHead(scale=0.25)),
        ("cohere", {"logit_scale": 0.0625}, OutputHead(scale=0.0625)),
        ("minicpm3", {"dim_model_base": 8, **LATENT}, OutputHead(scale=0.25)),
        ("gemma2", {"final_logit_softcapping": 5.0}, OutputHead(softcap=5.0)),
        ("nanochat", {"final_logit_softcapping": 7.0}, OutputHead(softcap=7.0)),
        ("modernbert-decoder", {}, OutputHead(before=("lm_head",))),
        ("llama", {}, OutputHead()),
    ],
)
def test_t2a_01_the_head_is_read_off_the_models_own_forward(family, changes, expected):
    """logits_scaling multiplies in one family and divides in another; MiniCPM divides by a ratio of two widths."""
    policy = tiny_policy(family, **changes)
    assert policy.head == expected
    torch.testing.assert_close(
        policy(pack_rows(ROWS, TOTALS)).logprob, stock_scores(policy, ROWS)[0], rtol=0, atol=1e-4
    )


def test_t2a_03_layers_before_the_head_run_and_train():
    """ModernBERT's decoder: logits are decoder(norm(gelu(dense(h)))). Sampling is compared in ``test_attention.py``."""
    policy = tiny_policy("modernbert-decoder")
    policy(pack_rows(ROWS, TOTALS), objective=Added()).backward()
    for name in ("lm_head.dense.weight", "lm_head.norm.weight"):
        assert policy.lm.get_parameter(name).grad.abs().max() > 1e-3, name


class Added:
    """The sum of the log-probabilities."""

    whole_sequences = False
    needs_entropy = False

    def __call__(self, logprob: Tensor, entropy: Tensor | None, part: slice) -> Tensor:
        return logprob.sum()


def test_t2a_05_an_adapter_on_the_head_is_in_the_logits_and_trains(tmp_path):
    policy = adapted("llama", LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    by_peft = eager(policy.lm)
    own = own_scores(by_peft)
    batch = pack_rows(ROWS, TOTALS)
    torch.testing.assert_close(policy(batch).logprob, own.detach(), rtol=0, atol=1e-4)
    policy(batch, objective=Added()).backward()
    ours = {name: p.grad.clone() for name, p in policy.lm.named_parameters() if "lm_head.lora_" in name}
    own.sum().backward()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, by_peft.get_parameter(name).grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        ids = torch.tensor([5, 9, 33, 2])
        sampled, _ = prefill(policy.eval(), [ids])
        torch.testing.assert_close(sampled, by_peft(input_ids=ids[None]).logits[:, -1], rtol=0, atol=1e-4)
        torch.testing.assert_close(exported_scores(policy, tmp_path), own.detach(), rtol=0, atol=1e-4)
        without = policy(batch, with_adapter=False).logprob
    assert (without - own).abs().max() > 1e-2, "the reference has no adapter on its head either"


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_t2a_05_an_adapter_on_one_of_two_tied_matrices_is_refused(module):
    error = refusal("qwen3", LoraConfig(r=2, target_modules=["q_proj", module]), **FAMILIES["qwen3"])
    assert error.key == "model.lora.target_modules"
    assert "it is one tensor with" in str(error)


@pytest.mark.parametrize(
    "model_type", ["bert", "roberta", "camembert", "xlm-roberta", "data2vec-text", "ernie", "roc_bert"]
)
@pytest.mark.parametrize("is_decoder", [True, False])
def test_t2a_33_encoders_are_refused(model_type, is_decoder):
    sizes = {
        name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    error = refusal(model_type, is_decoder=is_decoder, **sizes)
    assert error.got == model_type
    assert "more than a linear layer makes its logits" in str(error)


def test_t2a_33_a_family_that_looks_ahead_is_refused():
    """The guard itself: ELECTRA's head is one that a policy can run, but without is_decoder its attention sees all."""
    error = refusal("electra", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    assert "log-probabilities of samples laid end to end differ from those of its own forward by" in str(error)


# ---- adapters, merged


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("deepseek_v3", {}),
        ("glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
        ("gpt_oss", {}),
    ],
)
@torch.no_grad()
def test_t2a_07_adapters_of_fused_experts_are_merged(tmp_path, family, changes):
    policy = adapted(family, LoraConfig(r=2), **changes)
    assert any("experts" in one.weight for one in policy.adapted) or family == "gpt_oss"
    trained = own_scores(eager(policy.lm))
    torch.testing.assert_close(policy(pack_rows(ROWS, TOTALS)).logprob, trained, rtol=0, atol=1e-4)
    torch.testing.assert_close(exported_scores(policy, tmp_path), trained, rtol=0, atol=1e-4)
    assert (policy(pack_rows(ROWS, TOTALS), with_adapter=False).logprob - trained).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "modules"),
    [("gpt2", ["attn.c_proj"]), ("gpt2", ["c_attn", "c_fc"]), ("gpt2", "all-linear"), ("llama", ["embed_tokens"])],
)
@torch.no_grad()
def test_t2a_08_adapters_of_transposed_matrices_are_merged_transposed(tmp_path, family, modules):
    policy = adapted(family, LoraConfig(r=2, target_modules=modules))
    trained = own_scores(eager(policy.lm))
    torch.testing.assert_close(exported_scores(policy, tmp_path), trained, rtol=0, atol=1e-4)
    assert (policy(pack_rows(ROWS, TOTALS), with_adapter=False).logprob - trained).abs().max() > 1e-3


def test_t2a_07_an_adapter_past_which_the_model_reads_its_weight_is_frozen_and_said():
    """LongCat's router multiplies with the weight of a layer that it never calls."""
    values = {
        **{name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")},
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        **LATENT,
    }
    config = ModelConfig(architecture={"model_type": "longcat_flash", **values}, lora=LoraConfig(r=2))
    policy = build_policy(config, seed=0, temperature=1.0)
    routers = [p.requires_grad for name, p in policy.named_parameters() if "classifier.lora_" in name]
    assert routers == [False, False]
    assert "adapters without effect, as the model reads the weight itself: model.layers.*.mlp.router.classifier" in (
        policy.loading
    )


# ---- decoding, positions, shapes


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1"])
def test_t2a_11_latent_attention_decodes(family):
    """Values are narrower than queries."""
    config = ModelConfig(
        architecture={"model_type": family, "num_experts_per_tok": 2}
        if family == "deepseek_v2"
        else {"model_type": family}
    )
    found = compare(load_model_config(config), small_models(config), LOGPROBS)
    assert found.problem is None
    assert found.worst["log-probabilities of decoded tokens"] < 1e-4


def longrope(original: int) -> dict[str, Any]:
    """Two sets of frequencies for heads of 8; the second one is for samples longer than ``original``."""
    return {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 4.0, 6.0, 8.0],
            "original_max_position_embeddings": original,
        },
    }


def test_t2a_12_a_sample_that_would_switch_the_frequencies_of_its_row_is_refused():
    """Original 8, samples of 14, 4, 17 and 17 tokens in one row: transformers switches for all of them."""
    policy = tiny_policy("phi3", **longrope(8))
    rows = [row(sample(i, 2, length - 2)) for i, length in enumerate((14, 4, 17, 17))]
    with pytest.raises(ConfigError, match=r"a sample has 17 tokens, and with more than 8 of them .*longrope"):
        policy(pack_rows(rows, TOTALS))
    short = [row(sample(i, 2, length - 2)) for i, length in enumerate((8, 4, 5))]
    torch.testing.assert_close(
        policy(pack_rows(short, TOTALS)).logprob, stock_scores(policy, short)[0], rtol=0, atol=1e-5
    )
    config = load_model_config(ModelConfig(architecture=architecture("phi3", **longrope(8))))
    assert positions_of(config) == 8
    assert "8 positions before its rotary frequencies change for a whole row (longrope)" in positions_in_words(config)


@torch.no_grad()
def test_t2a_12_decoding_stops_before_it_switches():
    from rlmodule.models.policy import DecodeBatch

    policy = tiny_policy("phi3", **longrope(8)).eval()
    _, cache = prefill(policy, [torch.arange(2, 9), torch.arange(2, 4)])
    policy(DecodeBatch(torch.tensor([5, 6]), cache))
    with pytest.raises(ConfigError, match="a sample has 9 tokens"):
        policy(DecodeBatch(torch.tensor([5, 6]), cache))
    with pytest.raises(ConfigError, match="a sample has 10 tokens"):
        prefill(policy, [torch.arange(2, 12)])


def test_t2a_12_dynamic_frequencies_are_refused_beyond_the_positions_they_start_from():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    policy = tiny_policy("llama", max_position_embeddings=8, rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"more than 8 of them .*dynamic"):
        policy(pack_rows([row(sample(0, 3, 8)), row(sample(1, 2, 2))], TOTALS))


GEMMA4 = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA3N = {
    **{name: value for name, value in GEMMA4.items() if name != "global_head_dim"},
    "intermediate_size": [48] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "laurel_rank": 8,
}


@pytest.mark.parametrize(("family", "values"), [("gemma4_text", GEMMA4), ("gemma3n_text", GEMMA3N)])
@torch.no_grad()
def test_t2a_17_layers_of_several_sizes_that_share_keys(tmp_path, family, values):
    """Packed, gradients, decoding and adapters, by the comparison that precedes every run; and the folder."""
    config = ModelConfig(architecture={"model_type": family, **values}, lora=LoraConfig(r=2))
    found = compare(load_model_config(config), small_models(config), LOGPROBS)
    assert found.problem is None
    assert {what for what, worst in found.worst.items() if worst < 1e-3} == set(found.worst)
    policy = tiny_policy(family, **values)
    torch.testing.assert_close(
        policy(pack_rows(ROWS, TOTALS)).logprob, stock_scores(policy, ROWS)[0], rtol=0, atol=1e-4
    )
    save_pretrained(tmp_path, policy.lm, byte_tokenizer(), dict(single({"policy": policy}).full_weights("policy")))
    again = build_policy(ModelConfig(path=str(tmp_path)), seed=3, temperature=1.0)
    assert torch.equal(again(pack_rows(ROWS, TOTALS)).logprob, policy(pack_rows(ROWS, TOTALS)).logprob)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_t2a_34_packed_is_alone(family):
    changes = {"head_dim": 8, "sliding_window": 4, "num_key_value_heads": 2}
    policy = tiny_policy(family, **changes)
    torch.testing.assert_close(
        policy(pack_rows(ROWS, TOTALS)).logprob, stock_scores(policy, ROWS)[0], rtol=0, atol=1e-5
    )


# ---- casts


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_t2a_15_a_router_stays_in_float32(tmp_path, family):
    changes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    policy = tiny_policy(family, **(changes if family == "glm4_moe" else {}))
    bias = torch.tensor([10.001, 10.002, 10.003, 10.004])
    policy.lm.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    weights = dict(single({"policy": policy}).full_weights("policy", torch.bfloat16))
    save_pretrained(tmp_path, policy.lm, byte_tokenizer(), weights)
    stored = load_file(tmp_path / FILE)
    gate = "model.layers.1.mlp.gate."
    assert stored[f"{gate}e_score_correction_bias"].tolist() == bias.tolist()
    assert stored[f"{gate}weight"].dtype == torch.float32
    assert {t.dtype for name, t in stored.items() if ".gate." not in name} == {torch.bfloat16}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(again.model.layers[1].mlp.gate.e_score_correction_bias, bias)


@torch.no_grad()
def test_t2a_15_a_router_computes_in_float32_under_autocast():
    """The same hidden states give the same scores, to the bit, with autocast and without."""
    policy = tiny_policy("deepseek_v3", precision="bf16-mixed")
    gate = policy.lm.model.layers[1].mlp.gate
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    expected = gate(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        found = gate(hidden)
        rounded = torch.nn.functional.linear(hidden, gate.weight)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert rounded.dtype == torch.bfloat16, "what autocast would have done"
    assert policy(pack_rows(ROWS, TOTALS)).logprob.isfinite().all()


def test_t2a_15_both_lists_of_a_family_are_kept_in_an_export():
    lm = tiny_policy("afmoe", num_experts=4, num_experts_per_tok=2, num_dense_layers=1, head_dim=8).lm
    cast = Cast(torch.bfloat16, fp32_names(lm))
    kinds = {name: cast(name, tensor).dtype for name, tensor in lm.state_dict().items()}
    assert kinds["model.layers.0.input_layernorm.weight"] == torch.float32
    assert kinds["model.layers.1.mlp.expert_bias"] == torch.float32
    assert kinds["model.layers.1.mlp.experts.gate_up_proj"] == torch.bfloat16


# ---- families that are refused in words


@pytest.mark.parametrize("model_type", ["falcon", "gpt_neo", "bloom"])
def test_t2a_21_attention_of_its_own_has_one_sample_per_row_and_says_so(model_type):
    note = family_of(model_type).note
    assert note.startswith(f"{RowMode.ALONE.value}, as ")
    assert "samples laid end to end differ" in note or "it has attention of its own" in note


def test_t2a_21_a_model_that_no_text_alone_can_run_is_refused_in_words():
    error = refusal("llama4_text")
    assert (error.key, error.got) == ("model.architecture.model_type", "llama4_text")
    assert "its head is a part of its trunk" in str(error)


def test_t2a_19_layers_that_hand_no_keywords_on_have_one_sample_per_row_and_say_so():
    """Nemotron: its attention is not told where samples begin and end."""
    found = family_of("nemotron", **SMALL)
    assert found.rows is RowMode.ALONE
    assert "its layers do not hand on to their attention where samples begin and end" in found.note


@pytest.mark.parametrize(
    ("model_type", "rows"),
    [
        ("qwen3_next", RowMode.PACKED),
        ("jamba", RowMode.PACKED),
        ("falcon_h1", RowMode.PACKED),
        ("minimax", RowMode.PACKED_UNCACHED),
        ("mamba", RowMode.ALONE),
        ("recurrent_gemma", RowMode.ALONE_UNCACHED),
    ],
)
def test_t2a_35_a_state_that_runs_along_a_row_is_kept_to_its_sample(model_type, rows):
    found = family_of(model_type)
    assert found.rows is rows
    assert max(found.worst.values()) < 1e-4


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_t2a_36_recomputed_activations_change_no_gradient(family, mode):
    grads = []
    for activation_checkpointing in ("none", mode):
        config = ModelConfig(architecture=architecture(family), activation_checkpointing=activation_checkpointing)
        policy = build_policy(config, seed=0, temperature=1.0).train()
        policy(pack_rows(ROWS, TOTALS), objective=Added()).backward()
        grads.append({name: p.grad for name, p in policy.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_t2a_31_a_load_balancing_loss_in_the_configuration_is_left_out():
    grads = []
    for values in ({}, {"output_router_logits": True, "router_aux_loss_coef": 10.0}):
        config = ModelConfig(architecture={**architecture("qwen3_moe"), **values})
        policy = build_policy(config, seed=0, temperature=1.0).train()
        policy(pack_rows(ROWS, TOTALS), objective=Added()).backward()
        grads.append({name: p.grad for name, p in policy.named_parameters()})
    assert any("mlp.gate" in name and grad.any() for name, grad in grads[0].items())
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


# ---- files that are not the model's


def changed(folder: Any, change: Any, family: str = "llama") -> ModelConfig:
    policy = tiny_policy(family)
    save_pretrained(folder, policy.lm, byte_tokenizer())
    state = load_file(folder / FILE)
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / FILE, {"format": "pt"})
    return ModelConfig(path=str(folder))


BUILDERS = (
    lambda config: build_policy(config, seed=0, temperature=1.0),
    lambda config: build_policy_on_meta(config, seed=0, temperature=1.0),
    lambda config: build_value_model(config, seed=0),
    lambda config: build_value_model_on_meta(config, seed=0),
)


@pytest.mark.parametrize("build", BUILDERS)
def test_t2a_23_a_missing_tensor_is_refused(tmp_path, build):
    name = "model.layers.1.mlp.up_proj.weight"
    config = changed(tmp_path, lambda state: state.pop(name))
    with pytest.raises(ConfigError, match=rf"\.path={tmp_path}: the files lack {name}, which would start from random"):
        build(config)


def test_t2a_23_a_missing_expert_is_refused(tmp_path):
    config = changed(tmp_path, lambda state: state.pop("model.layers.1.mlp.experts.1.up_proj.weight"), "qwen3_moe")
    with pytest.raises(ConfigError, match=r"model\.path="):
        build_policy_on_meta(config, seed=0, temperature=1.0)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight_scale_inv", "model.layers.0.self_attn.q_proj.bias"]
)
def test_t2a_23_a_tensor_that_a_layer_does_not_use_is_refused(tmp_path, build, name):
    config = changed(tmp_path, lambda state: state.update({name: torch.ones(32)}))
    with pytest.raises(ConfigError, match=rf"the files hold {name}, which the model does not use"):
        build(config)


@pytest.mark.parametrize("build", BUILDERS)
def test_t2a_23_a_part_that_the_model_does_not_have_is_said(tmp_path, build):
    names = ("vision_tower.patch.weight", "model.layers.2.mlp.up_proj.weight")
    model = build(changed(tmp_path, lambda state: state.update({name: torch.ones(3) for name in names})))
    assert "not used of the files: " in model.loading
    assert all(name in model.loading or " more" in model.loading for name in names)


def test_t2a_23_old_buffers_are_not_worth_a_word(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    for build in BUILDERS[:2]:
        assert "not used" not in build(changed(tmp_path, lambda state: state.update({name: torch.ones(4)}))).loading


def test_t2a_23_a_tensor_of_another_shape_is_named(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    config = changed(tmp_path, lambda state: state.update({name: state[name][:-1]}))
    with pytest.raises(ConfigError, match=rf"{name} is \[47, 32\] in the files, and \[48, 32\] in the model"):
        build_policy_on_meta(config, seed=0, temperature=1.0)
