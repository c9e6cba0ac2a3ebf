"""Shared bug cases of the value head: numbers and tolerances copied from the case list, id in each test's name."""

import pytest
import torch

from rlmodule.models.value import ValueHead
from tests.helpers.tiny import single


def head(weight, bias=0.0):
    made = ValueHead(len(weight))
    with torch.no_grad():
        made.weight.copy_(torch.tensor([weight]))
        made.bias.fill_(bias)
    return made


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16])
def test_val_01_a_value_is_fp32_whatever_it_is_made_of(weights, hidden):
    """VAL-01: weights cast by a sharding policy, hidden states of an autocast trunk; 256 + 7/8 is no bf16 number.

    Under every strategy with bf16 weights the same is in ``strategies/test_critic.py``.
    """
    made = head([256.0, 1.0]).to(weights)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=hidden is torch.bfloat16):
        value = made(torch.tensor([[1.0, 0.875]], dtype=hidden))
    assert value.dtype == torch.float32
    assert value.tolist() == pytest.approx([256.875], rel=0, abs=1e-6)


def test_val_03_a_head_says_the_same_after_its_weights_went_through_the_stream():
    """VAL-03: 3 - 2 + 0.25. Resumed runs are in ``strategies/test_critic.py``, exported folders in ``models/``."""
    model = torch.nn.Module()
    model.value_head = head([1.5, -2.0], bias=0.25)
    weights = dict(single({"policy": model}).full_weights("policy"))
    again = head([0.0, 0.0])
    again.load_state_dict({name.removeprefix("value_head."): tensor for name, tensor in weights.items()})
    assert again(torch.tensor([[2.0, 1.0]])).item() == pytest.approx(1.25, rel=0, abs=1e-5)
