"""Activation checkpointing makes activations again instead of keeping them, and changes no number."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.errors import ConfigError
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.models.recompute import check_offload, recompute_activations
from tests.helpers.tiny import WINDOWED, architecture, mixed_rows, share_rows, tiny_policy

OBJECTIVE = Objective(PPOClip(), AlgorithmConfig(entropy_coeff=0.1))


class Count(TorchDispatchMode):
    """Counts calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] = self.calls.get(func._schema.name, 0) + 1
        return func(*args, **(kwargs or {}))


def gradients(
    mode: str, family: str = "qwen3", *, offload: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, int]]:
    """(loss, gradients, calls of each operation in forward and backward)."""
    policy = tiny_policy(family)
    recompute_activations(policy.lm, mode, offload=offload)
    policy.train()
    (mini_batch,) = share_rows(mixed_rows(), BatchingConfig())
    share = OBJECTIVE.for_micro_batch(mini_batch.micro_batches[0], mini_batch.totals)
    with Count() as count:
        loss = policy(mini_batch.micro_batches[0], objective=share)
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in policy.named_parameters()}, count.calls


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2", *WINDOWED])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_it_changes_no_number(mode: str, family: str) -> None:
    loss, expected, _ = gradients("none", family)
    again, got, _ = gradients(mode, family)
    assert torch.equal(again, loss)
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


def test_full_makes_everything_again_and_selective_spares_products_and_attention() -> None:
    plain, full, selective = (gradients(mode)[2] for mode in ("none", "full", "selective"))
    norms, products = "aten::rsqrt", "aten::mm"
    assert full[norms] > plain[norms]
    assert full[products] > plain[products]
    assert selective[norms] == full[norms]
    assert selective[products] == plain[products]
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert selective[attention] == plain[attention] < full[attention]


def without_page_locks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Let a machine without a device offload; returns the shapes of what goes to host memory, as it goes."""
    gone: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        gone.append(tensor.shape)
        return tensor.clone()

    hooks = partial(torch.autograd.graph.saved_tensors_hooks, pack, lambda tensor: tensor)
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", lambda **_: hooks())
    return gone


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gpt_oss"])
def test_offloading_moves_the_inputs_of_blocks_and_no_weight(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    gone = without_page_locks(monkeypatch)
    loss, expected, _ = gradients("full", family)
    assert not gone
    again, got, _ = gradients("full", family, offload=True)
    assert torch.equal(again, loss)
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())
    hidden = [shape for shape in gone if len(shape) == 3]
    assert hidden == [hidden[0]] * 2, "one per block: [1, T, H]"
    assert all(len(shape) == 1 and shape[0] == 0 for shape in gone if len(shape) != 3), "and torch's own placeholder"


def test_offloading_is_refused_where_more_would_travel_or_nothing_could() -> None:
    for mode in ("none", "selective"):
        with pytest.raises(ConfigError, match=r"activation_offload=True: .*Use model.activation_checkpointing=full"):
            ModelConfig(architecture=architecture(), activation_checkpointing=mode, activation_offload=True)
    check_offload("cuda")
    with pytest.raises(ConfigError, match="in host memory already"):
        check_offload("cpu")


def test_a_configured_model_recomputes() -> None:
    config = ModelConfig(architecture=architecture(), activation_checkpointing="full")
    assert build_policy(config, seed=0, temperature=1.0).lm.is_activation_checkpointing


def test_a_model_that_does_not_offer_it_is_refused() -> None:
    lm = nn.Linear(1, 1)
    lm.supports_gradient_checkpointing = False  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"model.activation_checkpointing=full: Linear does not offer it"):
        recompute_activations(lm, "full")


def test_unknown_words_and_compiling_besides_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing=half.*Known: full, none, selective"):
        ModelConfig(architecture=architecture(), activation_checkpointing="half")
    with pytest.raises(ConfigError, match=r"compile=True: .*activation_checkpointing=full"):
        ModelConfig(architecture=architecture(), activation_checkpointing="full", compile=True)
