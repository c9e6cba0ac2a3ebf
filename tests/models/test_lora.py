"""Adapters: what trains, what the reference is, and what an exported folder holds."""

# Shared cases: T2A-23.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.errors import ConfigError
from rlmodule.models import lora
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig, load_model_config
from rlmodule.models.lora import LoraConfig, adapter_only, merged, save_adapter
from rlmodule.models.policy import PolicyModel
from rlmodule.optim.adamw import AdamW
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import Stepper, architecture, ddp, mixed_rows, share_rows, single, weights_of

# peft 0.21 asks transformers 5.24 by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LORA = LoraConfig(r=4, alpha=8)


def policy_of(family: str = "qwen3", path: str | None = None, config: LoraConfig = LORA) -> PolicyModel:
    model = ModelConfig(path=path, tokenizer="byte", architecture={} if path else architecture(family), lora=config)
    return build_policy(model, seed=0, temperature=1.0)


def trained(policy: PolicyModel, steps: int = 3) -> PolicyModel:
    """The policy after some updates that move every adapter."""
    stepper = Stepper(policy, single, optimizer=AdamW(lr=5e-2, warmup_steps=0))
    (mini_batch,) = share_rows(mixed_rows(), BatchingConfig())
    for _ in range(steps):
        assert stepper(mini_batch).stepped
    return policy


def score(policy: PolicyModel, **kwargs: bool) -> Tensor:
    (mini_batch,) = share_rows(mixed_rows(), BatchingConfig())
    with torch.no_grad():
        return policy(mini_batch.micro_batches[0], **kwargs).logprob


def stream(policy: PolicyModel) -> list[tuple[str, Tensor]]:
    return list(single({"policy": policy}).full_weights("policy"))


def logits(lm: nn.Module) -> Tensor:
    with torch.no_grad():
        return lm(input_ids=torch.arange(2, 22)[None]).logits


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_only_adapters_train_and_the_start_is_unchanged(family: str) -> None:
    plain, policy = policy_of(family, config=LoraConfig()), policy_of(family)
    assert torch.equal(score(policy), score(plain)), "an adapter starts as nothing"
    before = weights_of(policy)
    trained(policy)
    moved = {name for name, tensor in weights_of(policy).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert all(p.requires_grad == (".lora_" in name) for name, p in policy.named_parameters())


def test_the_random_half_comes_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = weights_of(policy_of())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights_of(policy_of()).items())


def test_str_05_without_its_adapter_the_policy_is_what_training_started_from(tmp_path: Path) -> None:
    """Also when the start is an adapter itself: base 1.0 + 0.5 of the start; the policy moves on from there."""
    save_pretrained(tmp_path / "base", policy_of(config=LoraConfig()).lm, byte_tokenizer())
    base = str(tmp_path / "base")
    start = trained(policy_of(path=base))
    save_adapter(tmp_path / "start", start.lm, adapter_only(stream(start)))
    expected = score(start)

    policy = policy_of(path=str(tmp_path / "start"))
    assert load_model_config(ModelConfig(path=str(tmp_path / "start"), tokenizer="byte")).model_type == "qwen3"
    torch.testing.assert_close(score(policy), expected, rtol=1e-5, atol=1e-5)
    before = score(policy, with_adapter=False)
    assert torch.equal(before, score(policy)), "KL is exactly 0 before the first update"
    trained(policy)
    assert torch.equal(score(policy, with_adapter=False), before), "the reference does not move"
    assert (score(policy) - before).abs().max() > 1e-3, "the policy does"
    assert (before - score(policy_of(path=base), with_adapter=False)).abs().max() > 1e-3, "the start keeps its adapter"
    assert all(p.requires_grad == (".lora_" in name) for name, p in policy.named_parameters())


def test_the_adapter_comes_back_also_after_an_error() -> None:
    policy = trained(policy_of())
    expected = score(policy)
    with pytest.raises(RuntimeError), lora.without_adapter(policy.lm):
        raise RuntimeError
    assert torch.equal(score(policy), expected)


def test_ckpt_07_merging_is_weight_plus_scaled_product() -> None:
    weights = [
        ("layer.base_layer.weight", torch.eye(2)),
        ("layer.base_layer.bias", torch.ones(2)),
        ("layer.lora_A.default.weight", torch.tensor([[1.0, 2.0]])),
        ("layer.lora_B.default.weight", torch.tensor([[3.0], [4.0]])),
        ("norm.weight", torch.ones(2)),
    ]
    layer = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 2)})
    lora.add_adapter(layer, LoraConfig(r=1, alpha=2, target_modules=["layer"]), seed=0, base=None)
    whole = dict(merged(weights, lora.adapted_weights(layer)))
    assert whole["layer.weight"].tolist() == [[7.0, 12.0], [8.0, 17.0]]
    assert set(whole) == {"layer.weight", "layer.bias", "norm.weight"}
    assert set(dict(adapter_only(weights))) == {
        "base_model.model.layer.lora_A.weight",
        "base_model.model.layer.lora_B.weight",
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_ckpt_07_exported_adapter_and_merged_model_give_the_same_logits(family: str, tmp_path: Path) -> None:
    save_pretrained(tmp_path / "base", policy_of(family, config=LoraConfig()).lm, byte_tokenizer())
    policy = trained(policy_of(family, path=str(tmp_path / "base")))
    save_adapter(tmp_path / "adapter", policy.lm, adapter_only(stream(policy)))
    save_pretrained(tmp_path / "merged", policy.lm, byte_tokenizer(), dict(merged(stream(policy), policy.adapted)))

    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.") and "default" not in name for name in tensors)
    assert all(tensor.abs().max() > 0 for name, tensor in tensors.items() if "lora_B" in name)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    plain = logits(base)
    by_peft = logits(peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval())
    by_merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval())
    torch.testing.assert_close(by_peft, by_merged, rtol=1e-5, atol=1e-5)
    assert (by_merged - plain).abs().max() > 1e-3
    again = policy_of(family, path=str(tmp_path / "merged"), config=LoraConfig())
    torch.testing.assert_close(score(again), score(policy), rtol=1e-5, atol=1e-5)


def test_a_model_whose_head_is_tied_keeps_it_tied(tmp_path: Path) -> None:
    policy = trained(policy_of("qwen3"))
    assert policy.lm.config.tie_word_embeddings
    save_pretrained(tmp_path, policy.lm, byte_tokenizer(), dict(merged(stream(policy), policy.adapted)))
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def on_rank(rank: int) -> dict[str, Tensor]:
    from rlmodule.core.layout import Layout

    policy = policy_of()
    stepper = Stepper(policy, ddp, optimizer=AdamW(lr=1e-2, warmup_steps=0))
    (mini_batch,) = share_rows(mixed_rows(), BatchingConfig(), Layout(2, rank))
    stepper(mini_batch)
    return weights_of(policy)


@pytest.mark.ranks
def test_two_ranks_train_the_same_adapters_as_one() -> None:
    policy = policy_of()
    stepper = Stepper(policy, single, optimizer=AdamW(lr=1e-2, warmup_steps=0))
    (mini_batch,) = share_rows(mixed_rows(), BatchingConfig())
    stepper(mini_batch)
    for weights in run_on_ranks(2, on_rank):
        for name, tensor in weights_of(policy).items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora.dropout=0.1: .*Use model.lora.dropout=0.0"):
        LoraConfig(r=4, dropout=0.1)
    with pytest.raises(ConfigError, match=r"model.lora.target_modules=\['nose'\].*all-linear"):
        policy_of(config=LoraConfig(r=4, target_modules=["nose"]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop(min(state)), "the adapter lacks"),
        (
            lambda state: state.update({"base_model.model.nowhere.lora_A.weight": torch.ones(1, 1)}),
            "holds, for no layer",
        ),
    ],
)
def test_t2a_23_an_adapter_that_is_not_whole_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    """Half an adapter would be no adapter in half of the layers."""
    save_pretrained(tmp_path / "base", policy_of(config=LoraConfig()).lm, byte_tokenizer())
    start = trained(policy_of(path=str(tmp_path / "base")))
    save_adapter(tmp_path / "start", start.lm, adapter_only(stream(start)))
    file = tmp_path / "start" / "adapter_model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"model.path={tmp_path / 'start'}: the adapter") as caught:
        policy_of(path=str(tmp_path / "start"))
    assert says in str(caught.value)


def test_an_adapter_that_does_not_name_its_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: .*names no base model"):
        load_model_config(ModelConfig(path=str(tmp_path), tokenizer="byte"))
