"""What a model's files say of it without its weights."""

import json

import pytest

from rlmodule.models.description import ModelConfig, generation_end_tokens


@pytest.mark.parametrize(
    ("eos", "expected"), [([257, 48], (257, 48)), (2, (2,)), (None, ())], ids=["several", "one", "none"]
)
def test_end_tokens_of_a_model_are_those_of_its_generation_settings(tmp_path, eos, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert generation_end_tokens(ModelConfig(path=str(tmp_path))) == expected


def test_a_model_without_generation_settings_names_no_end_token(tmp_path):
    assert generation_end_tokens(ModelConfig(path=str(tmp_path))) == ()
    assert generation_end_tokens(ModelConfig(architecture={"model_type": "llama", "eos_token_id": 5})) == ()


def test_an_adapter_has_those_of_its_base(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert generation_end_tokens(ModelConfig(path=str(adapter))) == (1, 4)
