"""AdamW: decay on weights alone, only for what trains; settings that cannot work are refused."""

import pytest
import torch
from torch import nn

from rlmodule.core.errors import ConfigError
from rlmodule.optim import OPTIMIZERS
from rlmodule.optim.adamw import AdamW


def test_decay_pulls_at_weights_and_leaves_biases_and_norms_alone():
    """With no gradient to speak of a step is w - lr * decay * w."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = AdamW(lr=0.1, weight_decay=0.5).build_for(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if p.ndim >= 2 else before[name]
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=0)


def test_only_what_trains_is_given_to_the_optimizer():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    parameters = [p for group in AdamW(lr=1e-3).build_for(model).param_groups for p in group["params"]]
    assert parameters == [model[1].weight], "and no group is empty"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"schedule": "step"}, "schedule"),
        ({"lr": -0.1}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"total_steps": 0}, "total_steps"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys, key):
    with pytest.raises(ConfigError) as caught:
        AdamW(**keys)
    assert caught.value.key == key


def test_the_optimizer_goes_by_the_name_of_its_file():
    assert "adamw" in OPTIMIZERS.names()
    assert OPTIMIZERS.get("adamw") is AdamW
