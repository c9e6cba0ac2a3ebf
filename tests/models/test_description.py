"""What a model's files say of it without its weights."""

import json

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig, generation_end_tokens, load_model_config, load_tokenizer


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


@pytest.mark.parametrize(
    "text", ["[]", '{"a"', '{"eos_token_id": "x"}', '{"eos_token_id": ["x"]}', '{"eos_token_id": -1}']
)
def test_generation_settings_that_name_no_ids_are_refused(tmp_path, text):
    """Read as none, they would leave responses without an end."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(
        ConfigError, match=rf"model\.path={tmp_path}: its generation_config.json does not name end tokens"
    ):
        generation_end_tokens(ModelConfig(path=str(tmp_path)))


LLAMA = {"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8}


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        json.dumps({**LLAMA, "hidden_size": "x"}),
        json.dumps({**LLAMA, "num_attention_heads": 0}),
        json.dumps({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}),
    ],
)
def test_a_configuration_that_is_none_is_refused_in_words(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"model\.path={tmp_path}: no model configuration can be read there \("):
        load_model_config(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": 5}'),
    ],
)
def test_a_tokenizer_that_is_none_is_refused_in_words(tmp_path, name, text):
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"model\.path={tmp_path}: no tokenizer can be read there \("):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("path", ["x" * 300, "~/nothing-of-this-name", ""])
def test_a_path_that_cannot_be_is_refused_in_words(path):
    with pytest.raises(ConfigError, match=r"model\.path="):
        load_model_config(ModelConfig(path=path))


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"base_model_name_or_path": 5}'])
def test_an_adapter_that_names_no_base_is_refused_in_words(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.path="):
        load_model_config(ModelConfig(path=str(tmp_path)))
