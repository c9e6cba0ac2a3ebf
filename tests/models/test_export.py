"""Weights on their way to disk."""

from __future__ import annotations

import re

import torch
from transformers import modeling_utils

from rlmodule.core.parameters import Cast
from rlmodule.models.building import save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.export import cast_tied
from tests.helpers.tiny import tiny_policy


def test_a_weight_under_two_names_is_one_tensor_after_the_cast_too():
    """Else a tied head is written a second time: 329 MB in the place of 269 for SmolLM2 in bfloat16."""
    tied, other = torch.ones(2, 3), torch.ones(2, 3)
    stream = iter([("embed.weight", tied), ("head.weight", tied), ("gate.weight", other)])
    weights = cast_tied(stream, Cast(torch.bfloat16, re.compile("gate")))
    assert weights["embed.weight"] is weights["head.weight"]
    assert [tensor.dtype for tensor in weights.values()] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_nothing_is_imported_to_find_out_what_a_model_is_wrapped_in(tmp_path, monkeypatch):
    """accelerate would import DeepSpeed, which takes longer than all else at the end of a small run."""

    def asked(model, **_):
        raise AssertionError("accelerate was asked")

    monkeypatch.setattr(modeling_utils, "extract_model_from_parallel", asked)
    before = modeling_utils.unwrap_model
    save_pretrained(tmp_path, tiny_policy().lm, byte_tokenizer())
    assert (tmp_path / "model.safetensors").is_file()
    assert modeling_utils.unwrap_model is before
