"""Quantised weights are made plain where transformers can, and refused in words where it cannot."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmodule.core.errors import ConfigError
from rlmodule.models.building import build_policy_on_meta, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig, first_line, load_model_config
from tests.helpers.tiny import filled, tiny_policy


@pytest.fixture
def folder(tmp_path):
    policy = tiny_policy("llama", vocab_size=260, num_hidden_layers=1)
    save_pretrained(tmp_path / "model", policy.lm, byte_tokenizer())
    return tmp_path / "model"


def quantise(folder, **how):
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": how}))


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"load_in_4bit": True}, "no quant_method"),
        ({"quant_method": "of_tomorrow"}, "of_tomorrow"),
    ],
)
def test_weights_of_a_few_bits_are_refused_from_their_description(folder, how, named):
    quantise(folder, **how)
    for section in ("model", "critic"):
        with pytest.raises(ConfigError, match=rf"{section}\.path=.*are quantised \({named}\).*Give the model that it"):
            load_model_config(ModelConfig(path=str(folder)), section)


def test_eight_bit_floats_become_the_matrices_that_they_stand_for(folder):
    """As DeepSeek and Qwen publish them: a scale for each block beside every matrix of a layer."""
    weights, expected = load_file(folder / "model.safetensors"), {}
    stored = dict(weights)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().max() / 448  # the largest number of the type
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
            expected[name] = stored[name].float() * scale
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    quantise(folder, quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
    policy = filled(build_policy_on_meta(ModelConfig(path=str(folder)), seed=0, temperature=1.0))
    assert "quantised" in policy.loading
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    found = dict(policy.lm.named_parameters())
    assert len(expected) == 7
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-2, atol=1e-4)
    save_pretrained(folder.parent / "again", policy.lm, byte_tokenizer(), dict(policy.lm.state_dict()))
    assert "quantization_config" not in json.loads((folder.parent / "again" / "config.json").read_text())


def test_the_reason_is_what_an_error_announces():
    assert first_line(ValueError("\nValidation error for field 'a':\n    ValueError: a is 3\nmore")) == (
        "Validation error for field 'a': ValueError: a is 3"
    )
    assert first_line(ValueError("")) == "ValueError"
