"""The learning rates of a run: those that are set, and for the rest the ones that fit its model.

Leaves out which rates fit which model (``models/learning_rates.py``) and schedules (``optim/parts/schedule.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlmodule.algorithm.config import DEMONSTRATIONS
from rlmodule.models.description import SEPARATE, ModelConfig
from rlmodule.models.learning_rates import OF_RANDOM_WEIGHTS, LearningRates, rates_of_size
from rlmodule.run.config import RunConfig

TOO_HIGH = 20  # times the rate that fits: from here on a trained model forgets what it knows within a few steps


def with_learning_rates(config: RunConfig, num_parameters: Callable[[], int]) -> RunConfig:
    """The configuration with a number for every learning rate that is null.

    Args:
        config: of the run.
        num_parameters: of its model; called where neither the command line nor the model's file has a number.
    """
    if _all_known(config.model):
        model = config.model
    else:
        rates = OF_RANDOM_WEIGHTS if config.model.path is None else rates_of_size(num_parameters())
        model = _with_rates(config.model, rates)
    config = replace(config, model=model)
    if config.optimizer.lr is None:
        config = replace(config, optimizer=replace(config.optimizer, lr=fitting(config)[0]))
    if config.model.value == SEPARATE and config.critic.optimizer.lr is None:
        optimizer = replace(config.critic.optimizer, lr=model.value_lr)
        config = replace(config, critic=replace(config.critic, optimizer=optimizer))
    return config


def settled_keys(config: RunConfig) -> dict[str, float | None]:
    """Full key -> value of every key that ``with_learning_rates`` fills in."""
    model = config.model
    keys = {
        "model.lr": model.lr,
        "model.sft_lr": model.sft_lr,
        "model.value_lr": model.value_lr,
        "model.lora.lr": model.lora.lr,
        "model.lora.sft_lr": model.lora.sft_lr,
        "optimizer.lr": config.optimizer.lr,
    }
    return keys | ({"critic.optimizer.lr": config.critic.optimizer.lr} if model.value == SEPARATE else {})


def fitting(config: RunConfig) -> tuple[float, str]:
    """(the rate that fits what this run trains, the key that it comes from); every key of the model has a number."""
    model, lora = config.model, config.model.lora
    imitates = config.algorithm.source == DEMONSTRATIONS or model.is_reward_model
    rates = {
        (False, False): (model.lr, "model.lr"),
        (False, True): (model.sft_lr, "model.sft_lr"),
        (True, False): (lora.lr, "model.lora.lr"),
        (True, True): (lora.sft_lr, "model.lora.sft_lr"),
    }
    rate, key = rates[lora.is_on, imitates]
    assert rate is not None, "with_learning_rates has filled it in"
    return rate, key


def learning_rate_in_words(config: RunConfig) -> str:
    """Which rate the run takes and why, and its warm-up; for the plan."""
    rate, (fits, key) = config.optimizer.peak_lr, fitting(config)
    why = f"{key}, which fits this model" if rate == fits else f"optimizer.lr; {key} of this model is {fits:g}"
    return f"{rate:g} ({why}), {config.optimizer.warmup_steps} steps of warm-up, then {config.optimizer.schedule}"


def learning_rate_warning(config: RunConfig) -> str:
    """One line where a trained model would be trained at a rate that destroys it; empty elsewhere."""
    rate, (fits, key) = config.optimizer.peak_lr, fitting(config)
    if config.model.path is None or rate <= TOO_HIGH * fits:
        return ""
    return (
        f"warning: optimizer.lr={rate:g} is {rate / fits:.0f} times the rate that fits this model ({key}={fits:g}); "
        "trained models lose what they know at such rates. Leave optimizer.lr out to take the one that fits"
    )


def _all_known(model: ModelConfig) -> bool:
    return None not in (model.lr, model.sft_lr, model.value_lr, model.lora.lr, model.lora.sft_lr)


def _with_rates(model: ModelConfig, rates: LearningRates) -> ModelConfig:
    """The keys that are null, filled in."""

    def known(given: float | None, fits: float) -> float:
        return fits if given is None else given

    lora = replace(model.lora, lr=known(model.lora.lr, rates.lora), sft_lr=known(model.lora.sft_lr, rates.lora_sft))
    return replace(
        model,
        lora=lora,
        lr=known(model.lr, rates.full),
        sft_lr=known(model.sft_lr, rates.sft),
        value_lr=known(model.value_lr, rates.value),
    )
