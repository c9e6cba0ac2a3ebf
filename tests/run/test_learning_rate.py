"""The learning rate of a run fits its model unless one is given, and one that destroys a trained model is warned of."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from rlmodule import cli
from rlmodule.algorithm.config import DEMONSTRATIONS, AlgorithmConfig
from rlmodule.models.description import ModelConfig
from rlmodule.models.learning_rates import OF_RANDOM_WEIGHTS, rates_of_size
from rlmodule.models.lora import LoraConfig
from rlmodule.models.published import config_of_shape
from rlmodule.models.size import size_of
from rlmodule.optim.adamw import AdamW
from rlmodule.run.config import RunConfig
from rlmodule.run.learning_rate import learning_rate_in_words, learning_rate_warning, settled_keys, with_learning_rates
from tests.helpers import composing

TINY = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


def compose(*words):
    return RunConfig.read(composing.compose(*words))


def settled(*words, size=10**8):
    return with_learning_rates(compose(*words), lambda: size)


NAMES = [name for name in cli.menu("model") if name not in ("tiny", "local")]


@pytest.mark.parametrize("name", NAMES)
def test_the_rates_of_a_named_model_are_those_of_its_size(name):
    model = compose(f"model={name}").model
    fits = rates_of_size(size_of(config_of_shape(model.shape)).total)
    assert (model.lr, model.sft_lr, model.value_lr) == (fits.full, fits.sft, fits.value)
    assert (model.lora.lr, model.lora.sft_lr) == (fits.lora, fits.lora_sft)
    assert model.lora.lr >= 10 * model.lr
    assert 5e-7 <= model.lr <= 2e-6
    assert 1e-5 <= model.lora.lr <= 1e-4


@pytest.mark.parametrize(
    ("words", "lr", "key"),
    [
        ((), 2e-4, "model.lr"),
        (("algorithm=sft",), 2e-4, "model.sft_lr"),
        (("model.lora.r=8",), 2e-4, "model.lora.lr"),
        (("model=qwen7b",), 1e-6, "model.lr"),
        (("model=qwen7b", "algorithm=dpo"), 1e-6, "model.lr"),
        (("model=qwen7b", "algorithm=sft"), 1e-5, "model.sft_lr"),
        (("model=qwen7b", "algorithm=rm"), 1e-5, "model.sft_lr"),
        (("model=qwen7b", "model.lora.r=8"), 2e-5, "model.lora.lr"),
        (("model=qwen7b", "model.lora.r=8", "algorithm=sft"), 2e-4, "model.lora.sft_lr"),
        (("model=local", "model.path=folder"), 2e-6, "model.lr"),
        (("model=local", "model.path=folder", "model.lora.r=8"), 1e-4, "model.lora.lr"),
        (("model=local", "model.path=folder", "model.lr=7e-6"), 7e-6, "model.lr"),
    ],
)
def test_what_is_trained_decides_which_rate_is_taken(words, lr, key):
    config = settled(*words)
    assert config.optimizer.lr == lr
    assert f"({key}, which fits this model)" in learning_rate_in_words(config)
    assert not learning_rate_warning(config)
    assert settled_keys(config)["optimizer.lr"] == lr
    assert None not in settled_keys(config).values()


def test_a_rate_of_the_command_line_wins_and_is_told_beside_the_one_that_fits():
    config = settled("model=qwen7b", "optimizer.lr=3e-6")
    assert config.optimizer.lr == 3e-6
    assert learning_rate_in_words(config).startswith("3e-06 (optimizer.lr; model.lr of this model is 1e-06)")


def test_the_built_in_model_trains_as_before():
    config = settled("algorithm=ppo", "model.value=separate")
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (2e-4, 5)
    assert (config.critic.optimizer.lr, config.critic.optimizer.warmup_steps) == (1e-3, 5)
    assert config.callbacks["checkpoint"].every_n_iterations == 1


def test_a_named_model_brings_its_warm_up_critic_and_checkpoint_interval():
    config = settled("model=qwen7b", "algorithm=ppo", "model.value=separate")
    assert config.critic.optimizer.lr == 1e-5
    assert settled_keys(config)["critic.optimizer.lr"] == 1e-5
    assert config.optimizer.warmup_steps == 10
    assert config.callbacks["checkpoint"].every_n_iterations == 10


def test_a_rate_far_above_the_one_that_fits_is_warned_of_for_trained_weights_only():
    with_path = partial(settled, "model=local", "model.path=folder")
    assert "200 times" in learning_rate_warning(with_path("optimizer.lr=2e-4", size=2 * 10**9))
    assert "Leave optimizer.lr out" in learning_rate_warning(with_path("optimizer.lr=2e-4"))
    assert not learning_rate_warning(with_path("optimizer.lr=3e-5"))
    assert not learning_rate_warning(settled("optimizer.lr=1.0"))


def test_a_library_run_of_random_weights_keeps_its_rate_after_its_warm_start():
    config = with_learning_rates(RunConfig(model=ModelConfig(architecture=TINY)), lambda: 10**4)
    assert config.optimizer.lr == OF_RANDOM_WEIGHTS.full
    warmed = with_learning_rates(config.starting_from("folder"), lambda: 10**4)
    assert warmed.optimizer.lr == OF_RANDOM_WEIGHTS.full
    assert "which fits this model" in learning_rate_in_words(warmed)


def test_the_size_is_asked_for_only_where_a_number_is_missing():
    def never():
        raise AssertionError("the model's files are read for nothing")

    assert with_learning_rates(compose("model=qwen7b"), never).optimizer.lr == 1e-6
    assert with_learning_rates(compose(), never).optimizer.lr == 2e-4
    of_demonstrations = RunConfig(
        model=ModelConfig(path="folder", lora=LoraConfig(r=4)), algorithm=AlgorithmConfig(source=DEMONSTRATIONS)
    )
    assert with_learning_rates(of_demonstrations, lambda: 10**9).optimizer.lr == 2e-4


@pytest.mark.parametrize("size", [10**8, 10**9, 3 * 10**9, 10**10, 10**11])
def test_larger_models_have_no_higher_rates(size):
    one, larger = rates_of_size(size), rates_of_size(3 * size)
    assert all(a >= b for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(larger), strict=True))
    assert one.lora >= 10 * one.full


def test_an_optimizer_is_not_built_without_a_rate():
    with pytest.raises(AssertionError, match="has a learning rate"):
        _ = AdamW().peak_lr
