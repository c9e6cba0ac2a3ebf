"""The comparison that precedes a run finds what it is for, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlmodule.core.errors import ConfigError
from rlmodule.models.agreement import Agreement, SmallModels, compare, compare_in, numbers_as_stars
from rlmodule.models.alone import RowMode
from rlmodule.models.building import build_policy, check_family, freeze, small_models
from rlmodule.models.description import ModelConfig, load_model_config
from rlmodule.models.lora import LoraConfig
from rlmodule.models.output_head import OutputHead
from rlmodule.models.policy import PolicyModel
from rlmodule.models.reading import LOGPROBS
from rlmodule.models.shrink import small_copies
from rlmodule.models.value import VALUES, ValueModel, build_value_model, small_value_models
from tests.helpers.tiny import architecture, tiny_policy

# peft 0.21 asks transformers 5.24 by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def config_of(family: str = "qwen3", **changes: Any) -> ModelConfig:
    return ModelConfig(architecture=architecture(family, **changes))


def compared(change: Callable[[PolicyModel], object], config: ModelConfig | None = None) -> Agreement:
    """The comparison of samples laid end to end, with something changed about the policy."""
    config = config or config_of()
    return compare_in(RowMode.PACKED, load_model_config(config), changed(small_models(config), change), LOGPROBS)


def changed(models: SmallModels[PolicyModel], change: Callable[[PolicyModel], object]) -> SmallModels[PolicyModel]:
    def ours(hf_config: Any, rows: RowMode) -> PolicyModel:
        policy = models.ours(hf_config, rows)
        change(policy)
        return policy

    return replace(models, ours=ours)


def test_a_right_policy_agrees():
    found = compared(lambda policy: None)
    assert found.problem is None
    assert max(found.worst.values()) < 1e-4
    assert len(found.worst) == 4


def test_a_wrong_scale_of_the_logits_is_found():
    found = compared(lambda policy: setattr(policy, "head", OutputHead(scale=2.0)))
    assert "log-probabilities of samples laid end to end differ" in str(found.problem)


def with_one_window_for_all(policy: PolicyModel) -> None:
    """Layers forget their window; where transformers makes the mask, it still has one."""
    for layer in policy.lm.model.layers:
        layer.self_attn.sliding_window = None


def test_a_window_that_is_not_kept_is_found():
    assert (
        compared(with_one_window_for_all, config_of("gemma2")).worst["log-probabilities of samples laid end to end"]
        > 1e-2
    )


def test_a_weight_without_its_gradient_is_found():
    found = compared(lambda policy: policy.lm.model.norm.requires_grad_(False), config_of("llama"))
    assert "gradients differ" in str(found.problem)


def test_a_network_that_is_another_in_training_is_found():
    def louder_in_training(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 1.5 if module.training else output

    found = compared(lambda policy: policy.lm.model.layers[0].mlp.register_forward_hook(louder_in_training))
    assert found.worst["log-probabilities of samples laid end to end"] < 1e-4
    assert "log-probabilities in training differ" in str(found.problem)


def forgetful(policy: PolicyModel) -> None:
    """Keys of the oldest token are lost on the way to the cache."""

    def forget(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache")
        if cache is not None and cache.writing is None and cache.layers:
            cache.layers[0].keys[:, :, 0] = 0

    policy.lm.model.layers[0].register_forward_pre_hook(forget, with_kwargs=True)


def test_decoding_that_forgets_is_found():
    found = compared(forgetful)
    assert found.worst["log-probabilities in training"] < 1e-4
    assert "log-probabilities of decoded tokens differ" in str(found.problem)


@pytest.mark.parametrize(
    ("change", "rows", "why"),
    [
        (lambda policy: None, RowMode.PACKED, ""),
        (forgetful, RowMode.PACKED_UNCACHED, "log-probabilities of decoded tokens differ"),
        (with_one_window_for_all, RowMode.ALONE, "log-probabilities of samples laid end to end differ"),
    ],
)
def test_the_first_way_that_is_right_is_taken_and_the_reason_said(change, rows, why):
    config = config_of("gemma2")
    found = compare(load_model_config(config), changed(small_models(config), change), LOGPROBS)
    assert (found.problem, found.rows) == (None, rows)
    assert why in found.why_not_packed
    assert found.note == (f"{rows.value}, as {found.why_not_packed}" if why else "")
    assert max(found.worst.values()) < 1e-4


def test_where_no_way_is_right_the_first_problem_is_told():
    config = config_of("llama")
    found = compare(
        load_model_config(config),
        changed(small_models(config), lambda policy: setattr(policy, "head", OutputHead(scale=2.0))),
        LOGPROBS,
    )
    assert found.rows is RowMode.PACKED
    assert "samples laid end to end differ" in str(found.problem)


def test_random_numbers_and_gradients_of_the_caller_are_left_alone():
    state = torch.get_rng_state()
    with torch.no_grad():
        check_family(load_model_config(config_of("mistral")), config_of("mistral"))
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_configuration_is_compared_once():
    config = config_of("qwen2")
    assert check_family(load_model_config(config), config) is check_family(load_model_config(config), config)
    other = replace(config, lora=LoraConfig(r=2))
    assert check_family(load_model_config(other), other) is not check_family(load_model_config(config), config)


def test_the_real_values_of_a_configuration_are_compared():
    """A published model that differs from its family's default: the layer kinds of its own."""
    config = config_of("qwen3", layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ConfigError, match="linear_attention"):
        build_policy(config, seed=0, temperature=1.0)


def test_adapters_that_only_the_real_model_has_room_for_are_no_reason_to_refuse():
    lora = LoraConfig(r=2, target_modules=["layers.7.self_attn.q_proj"])
    config = replace(config_of("llama", num_hidden_layers=8), lora=lora)
    policy = build_policy(config, seed=0, temperature=1.0)
    assert [one.weight for one in policy.adapted] == ["model.layers.7.self_attn.q_proj.base_layer.weight"]


def test_value_models_are_compared_too():
    config = config_of("qwen3")
    models = small_value_models(config, "critic")

    def ours(hf_config: Any, rows: RowMode) -> ValueModel:
        model = models.ours(hf_config, rows)
        model.lm.score.register_forward_hook(lambda module, args, value: 2 * value)
        return model

    hf_config = load_model_config(config)
    hf_config.num_labels = 1
    assert compare(hf_config, models, VALUES).problem is None
    found = compare(hf_config, replace(models, ours=ours), VALUES)
    assert "values of samples laid end to end differ" in str(found.problem)


def test_a_kind_that_has_no_value_model_is_refused():
    with pytest.raises(ConfigError, match=r"critic\.architecture\.model_type=granite: transformers has no granite for"):
        build_value_model(config_of("granite"), seed=0)


def test_what_is_frozen_is_said():
    policy = tiny_policy()
    said = freeze(policy.lm, Agreement(unreached=("model.norm", "model.nowhere")))
    assert said == "frozen, as no text reaches it: model.norm"
    assert [name for name, p in policy.lm.named_parameters() if not p.requires_grad] == ["model.norm.weight"]
    assert freeze(policy.lm, Agreement()) == ""


def test_numbers_of_layers_become_stars():
    assert numbers_as_stars("model.layers.12.mlp.experts.3.up") == "model.layers.*.mlp.experts.*.up"


def test_a_family_of_transformers_defaults_is_small_enough():
    """Seven billion parameters in the configuration, some hundred thousand in the comparison."""
    config = AutoConfig.for_model("llama", hidden_size=8192, num_attention_heads=64, num_key_value_heads=8)
    lm = small_models(ModelConfig(architecture={"model_type": "llama"})).ours
    assert sum(p.numel() for p in lm(next(small_copies(config)), RowMode.PACKED).parameters()) < 3_000_000
