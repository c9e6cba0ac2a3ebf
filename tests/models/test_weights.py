"""A model outlined without numbers is the loaded one in everything else; where names do not fit it is loaded whole."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlmodule.core.errors import ConfigError
from rlmodule.core.parameters import tied
from rlmodule.models import weights
from rlmodule.models.building import build_policy, build_policy_on_meta, parameter_count, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from tests.helpers.tiny import FAMILIES, filled, tiny_policy

FUSED = ("qwen3_moe", "qwen2_moe", "deepseek_v3")  # their files have experts one by one
FILE = "model.safetensors"


def saved(folder, family="qwen3", dtype=None, **changes):
    """A folder with a tiny model of the family, and the configuration that names it."""
    lm = tiny_policy(family, **changes).lm
    state = {name: tensor.to(dtype) for name, tensor in lm.state_dict().items()} if dtype else None
    save_pretrained(folder, lm, byte_tokenizer(), state)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_outline_has_no_numbers_and_becomes_the_loaded_model(tmp_path, family):
    config = saved(tmp_path, family)
    expected, outlined = (make(config, seed=0, temperature=1.0) for make in (build_policy, build_policy_on_meta))
    assert outlined.stored is not None, outlined.loading
    assert all(parameter.is_meta for parameter in outlined.parameters())
    assert parameter_count(outlined) == parameter_count(expected)
    state, wanted = filled(outlined).state_dict(), expected.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    assert [names for names, _ in tied(outlined)] == [names for names, _ in tied(expected)]
    for (name, buffer), (_, same) in zip(outlined.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, same), f"{name} is not in the files and must be right all the same"
    assert [m.training for m in outlined.lm.modules()] == [m.training for m in expected.lm.modules()]
    assert outlined.lm.generation_config.to_dict() == expected.lm.generation_config.to_dict()
    assert outlined.lm.config.to_dict() == expected.lm.config.to_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_become_fp32_masters(tmp_path, dtype):
    outlined = build_policy_on_meta(saved(tmp_path, dtype=dtype), seed=0, temperature=1.0)
    assert {p.dtype for p in outlined.parameters()} == {torch.float32}
    name = "lm.model.layers.0.mlp.up_proj.weight"
    assert outlined.stored.read(name).dtype == dtype
    policy = tiny_policy()
    assert torch.equal(filled(outlined).get_parameter(name), policy.get_parameter(name).to(dtype).float())


def test_several_files_are_read_through_their_index(tmp_path):
    policy = tiny_policy("llama")
    policy.lm.save_pretrained(tmp_path, max_shard_size="10KB")
    byte_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    outlined = filled(build_policy_on_meta(ModelConfig(path=str(tmp_path)), seed=0, temperature=1.0))
    for name, parameter in policy.named_parameters():
        assert torch.equal(outlined.get_parameter(name), parameter), name


def test_adapters_start_as_they_do_beside_loaded_weights(tmp_path):
    config = ModelConfig(path=saved(tmp_path).path, lora=LoraConfig(r=2))
    expected, outlined = (make(config, seed=5, temperature=1.0) for make in (build_policy, build_policy_on_meta))
    adapters = [name for name, p in outlined.named_parameters() if not p.is_meta]
    assert adapters and all("lora_" in name for name in adapters)
    assert [n for n, p in outlined.named_parameters() if p.requires_grad] == adapters
    state = filled(outlined).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_frozen_copy_of_an_outline_reads_for_itself(tmp_path):
    outlined = build_policy_on_meta(saved(tmp_path), seed=0, temperature=1.0)
    twin = filled(copy.deepcopy(outlined))
    assert all(parameter.is_meta for parameter in outlined.parameters())
    assert not any(parameter.is_meta for parameter in twin.parameters())


def test_a_random_model_has_its_numbers_at_once():
    config = ModelConfig(architecture={"model_type": "qwen3", **FAMILIES["qwen3"]})
    random, again = (make(config, seed=3, temperature=1.0) for make in (build_policy_on_meta, build_policy))
    assert (random.stored, random.loading) == (None, "")
    assert all(torch.equal(a, b) for a, b in zip(random.parameters(), again.parameters(), strict=True))


# ---- where tensors are not to be had by name


def changed(folder, change):
    """The tensors of a folder, changed in place."""
    state = load_file(folder / FILE)
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / FILE, {"format": "pt"})


def untie_on_disk(state):
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1


def base_model_only(state):
    for name in list(state):
        state[name.removeprefix("model.")] = state.pop(name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (untie_on_disk, "model.embed_tokens.weight and lm_head.weight are one tensor in the model and two in the file"),
        (base_model_only, "the files hold no model.embed_tokens.weight"),
    ],
)
def test_what_transformers_would_put_right_is_left_to_it(tmp_path, change, says):
    config = saved(tmp_path)
    changed(tmp_path, change)
    policy = build_policy_on_meta(config, seed=0, temperature=1.0)
    assert policy.stored is None
    assert says in policy.loading
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, stock[name]) for name, tensor in policy.lm.state_dict().items())


def test_a_tensor_stored_twice_with_equal_numbers_is_one(tmp_path):
    config = saved(tmp_path)
    changed(tmp_path, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
    policy = filled(build_policy_on_meta(config, seed=0, temperature=1.0))
    assert policy.lm.get_output_embeddings().weight is policy.lm.get_input_embeddings().weight


@pytest.mark.parametrize("family", FUSED)
def test_experts_are_read_one_by_one_and_no_others(tmp_path, family):
    """Twelve of them, so that the tenth must not come before the second."""
    count = {"qwen3_moe": "num_experts", "qwen2_moe": "num_experts", "deepseek_v3": "n_routed_experts"}[family]
    config = saved(tmp_path, family, **{count: 12})
    outlined = build_policy_on_meta(config, seed=0, temperature=1.0)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    fused = [name for name in stock if "experts." in name and stock[name].ndim == 3 and "shared" not in name]
    assert fused
    for name in fused:
        assert torch.equal(outlined.stored.read(f"lm.{name}"), stock[name])
        assert torch.equal(outlined.stored.read(f"lm.{name}", slice(9, 11)), stock[name][9:11])
        assert len({piece.name for parts in outlined.stored.places[name].pieces[9:11] for piece in parts}) <= 4


def test_a_file_that_lacks_an_expert_is_left_to_transformers_which_refuses_it(tmp_path):
    config = saved(tmp_path, "qwen3_moe")
    changed(tmp_path, lambda state: state.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"model\.path="):
        build_policy_on_meta(config, seed=0, temperature=1.0)


def test_quantised_weights_are_not_taken_for_numbers(tmp_path):
    saved(tmp_path)
    lm = tiny_policy().lm
    lm.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(weights.NotByNameError, match="quantised"):
        weights.StoredWeights.of(lm, str(tmp_path))


def test_a_damaged_file_is_the_users_error(tmp_path):
    """Half a download, or the text that stands in for a large file."""
    config = saved(tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.path=.*damaged"):
        build_policy_on_meta(config, seed=0, temperature=1.0)


def test_another_shape_is_not_taken(tmp_path):
    saved(tmp_path)
    other = tiny_policy(intermediate_size=40).lm
    with pytest.raises(weights.NotByNameError, match=r"is F32 \[48, 32\] in the files, not \[40, 32\]"):
        weights.StoredWeights.of(other, str(tmp_path))


def test_stand_ins_take_no_memory_and_leave_no_trace(tmp_path):
    outlined = build_policy_on_meta(saved(tmp_path), seed=0, temperature=1.0)
    before = dict(outlined.named_parameters())
    with pytest.raises(KeyError), weights.meta_parameters(outlined.lm):
        assert {p.untyped_storage().nbytes() for p in outlined.parameters()} == {4}
        outlined.requires_grad_(False)
        raise KeyError
    after = dict(outlined.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert not any(parameter.requires_grad for parameter in after.values())


def test_the_generation_settings_of_the_folder_are_kept(tmp_path):
    config = saved(tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**generation, "top_k": 7}))
    assert build_policy_on_meta(config, seed=0, temperature=1.0).lm.generation_config.top_k == 7
