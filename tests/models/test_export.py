"""Weights on their way to disk."""

from __future__ import annotations

import re

import torch

from rlmodule.core.parameters import Cast
from rlmodule.models.export import cast_tied


def test_a_weight_under_two_names_is_one_tensor_after_the_cast_too():
    """Else a tied head is written a second time: 329 MB in the place of 269 for SmolLM2 in bfloat16."""
    tied, other = torch.ones(2, 3), torch.ones(2, 3)
    stream = iter([("embed.weight", tied), ("head.weight", tied), ("gate.weight", other)])
    weights = cast_tied(stream, Cast(torch.bfloat16, re.compile("gate")))
    assert weights["embed.weight"] is weights["head.weight"]
    assert [tensor.dtype for tensor in weights.values()] == [torch.bfloat16, torch.bfloat16, torch.float32]
