"""AdamW with 8-bit moments: close to AdamW, a quarter of its bytes, saved and restored, refused where weights are cut."""

import importlib.util

import pytest
import torch
from torch import nn

from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.optim.adamw import AdamW
from rlmodule.optim.adamw8bit import AdamW8bit
from tests.helpers.runs import small_run
from tests.helpers.tiny import single

IS_INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
needs_it = pytest.mark.skipif(not IS_INSTALLED, reason="needs bitsandbytes (extra eight_bit)")
STEPS, LR = 12, 1e-2


class Weights(nn.Module):
    """A matrix of several blocks and a half, and a vector that is too small for 8 bits."""

    sequence = None

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(40, 112, generator=rng))
        self.bias = nn.Parameter(torch.randn(40, generator=rng))

    def gradients(self, step: int) -> None:
        rng = torch.Generator().manual_seed(step + 1)
        for parameter in self.parameters():
            parameter.grad = parameter.detach() + torch.randn(parameter.shape, generator=rng) * 0.3


def train(config, model, optimizer=None, steps=range(STEPS)):
    optimizer = optimizer or config.build_for(model)
    for step in steps:
        model.gradients(step)
        optimizer.step()
    return optimizer


@needs_it
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_moves_weights_as_adamw_does_to_a_few_percent(weight_decay):
    start, eight, exact = Weights(), Weights(), Weights()
    settings = {"lr": LR, "weight_decay": weight_decay}
    train(AdamW8bit(**settings), eight)
    train(AdamW(**settings), exact)
    torch.testing.assert_close(eight.bias, exact.bias, rtol=1e-5, atol=1e-6)
    way, off = exact.matrix - start.matrix, eight.matrix - exact.matrix
    assert off.norm() < 0.05 * way.norm()
    assert off.norm() > 0, "it is quantised"


@needs_it
def test_moments_take_a_quarter_of_the_bytes():
    optimizer = train(AdamW8bit(lr=LR), model := Weights(), steps=range(1))
    bytes_of = {name: t.numel() * t.element_size() for name, t in optimizer.state[model.matrix].items() if t.ndim}
    assert sum(bytes_of.values()) == pytest.approx(AdamW8bit.state_bytes * model.matrix.numel(), rel=0.03)
    assert AdamW8bit.state_bytes * 4 == AdamW.state_bytes


@needs_it
def test_a_restored_state_goes_on_as_if_it_had_never_stopped():
    whole, model, config = Weights(), Weights(), AdamW8bit(lr=LR)
    train(config, whole)
    strategy = single({"policy": model})
    saved = strategy.state_dict_to_save("policy", train(config, model, steps=range(5)))
    copies = {key: tensor.clone() for key, tensor in saved.items()}
    restored = Weights()
    strategy, optimizer = single({"policy": restored}), config.build_for(restored)
    wanted = strategy.state_dict_to_load("policy", optimizer)
    assert {key: (t.shape, t.dtype) for key, t in wanted.items()} == {
        key: (t.shape, t.dtype) for key, t in copies.items()
    }
    for key, tensor in wanted.items():
        tensor.copy_(copies[key])
    train(config, restored, optimizer, steps=range(5, STEPS))
    for name, parameter in whole.named_parameters():
        assert torch.equal(restored.get_parameter(name), parameter), name


def test_settings_and_a_missing_package_are_refused_in_words(monkeypatch):
    with pytest.raises(ConfigError, match="eight_bit_from"):
        AdamW8bit(eight_bit_from=0)
    with pytest.raises(ConfigError, match="betas"):
        AdamW8bit(betas=(0.9, 1.0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"optimizer=adamw8bit needs the package 'bitsandbytes'.*eight_bit"):
        AdamW8bit(lr=LR).build_for(Weights())


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed"])
def test_a_strategy_that_cuts_weights_is_refused(tmp_path, strategy):
    with pytest.raises(ConfigError, match="its scales are of blocks of a whole weight"):
        small_run(tmp_path, "optimizer=adamw8bit", f"strategy={strategy}", "trainer.devices=2")
