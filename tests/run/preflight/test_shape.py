"""Issue 10, point 21: sizes that no model can have are refused by their key, before anything is written."""

from __future__ import annotations

import pytest

from tests.test_conf import refusal_of

WRONG = {
    "num_hidden_layers=0": "must be at least 1",
    "hidden_size=0": "must be at least 1",
    "num_attention_heads=0": "must be at least 1",
    "num_key_value_heads=0": "must be at least 1",
    "head_dim=-1": "must be at least 1",
    "intermediate_size=0": "must be at least 1",
    "max_position_embeddings=-5": "must be at least 1",
    "num_attention_heads=5": "num_key_value_heads=2 does not divide it",
    "vocab_size=100000000000": "fits no machine",
    "pad_token_id=9999": "the model knows tokens 0 to 259",
    "eos_token_id=9999": "the model knows tokens 0 to 259",
    "eos_token_id=[257,9999]": "the model knows tokens 0 to 259",
}


@pytest.mark.parametrize(("setting", "says"), WRONG.items())
def test_a_size_that_no_model_has_is_named(tmp_path, setting, says):
    key, _, _ = setting.partition("=")
    text = str(refusal_of(tmp_path, f"model.architecture.{setting}"))
    assert text.startswith(f"model.architecture.{key}="), text
    assert says in text
