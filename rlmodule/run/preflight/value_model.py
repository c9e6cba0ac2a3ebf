"""Who says values, and whether somebody reads them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import PreTrainedConfig

from rlmodule.algorithm.critic import CriticConfig
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.models.description import NO_VALUE, SEPARATE, SHARED
from rlmodule.models.lora import is_adapter
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.layout import check_layout
from rlmodule.run.preflight.lengths import check_positions


def check_value(config: RunConfig) -> None:
    """Values are made for an advantage that reads them, and by a model that can."""
    kind, reads = config.model.value, config.advantage_reads("tokens")
    if reads and kind == NO_VALUE:
        raise ConfigError(
            key="model.value",
            got=kind,
            because=f"advantage {type(config.advantage).__name__} is made of values",
            fix="Use model.value=shared or model.value=separate, or another advantage",
        )
    if kind in (SHARED, SEPARATE) and not reads:
        raise ConfigError(
            key="model.value",
            got=kind,
            because="nothing reads values here: no advantage of this run is made of them",
            fix="Use algorithm=ppo or advantage=gae, or model.value=none",
        )


def check_critic(config: RunConfig) -> None:
    """What is said of a value model of its own is said where there is one, and can be done."""
    kind, critic = config.model.value, config.critic
    if kind != SEPARATE:
        _check_separate_keys(kind, critic)
    if kind == SEPARATE and critic.warmup_iterations >= config.trainer.max_epochs:
        raise ConfigError(
            key="critic.warmup_iterations",
            got=critic.warmup_iterations,
            because=f"the run has trainer.max_epochs={config.trainer.max_epochs} iterations, and the policy would "
            "not train in any",
            fix="Use fewer, or more iterations",
        )
    if kind == SEPARATE and critic.path is None and not critic.architecture and is_adapter(config.model.path):
        raise ConfigError(
            key="critic.path",
            got=None,
            because=f"the policy starts from the adapter {config.model.path}, and a value model needs whole weights",
            fix="Give critic.path, or use model.value=shared",
        )


def _check_separate_keys(kind: str, critic: CriticConfig) -> None:
    """What is for a value model beside the policy would be passed over in silence where there is none."""
    default = _of_a_critic(CriticConfig())
    for key, value in _of_a_critic(critic).items():
        if value != default.get(key):
            raise ConfigError(
                key=f"critic.{key}",
                got=value,
                because=f"with model.value={kind} there is no value model beside the policy, which this is for",
                fix="Leave it out, or use model.value=separate",
            )


def _of_a_critic(critic: CriticConfig) -> dict[str, Any]:
    """Key -> value of what a value model of its own has."""
    own = ("path", "architecture", "mini_batch_size", "warmup_iterations")
    optimizer = {
        key: list(value) if isinstance(value, tuple) else value  # as written in YAML
        for key, value in asdict(critic.optimizer).items()
    }
    return {name: getattr(critic, name) for name in own} | {f"optimizer.{key}": v for key, v in optimizer.items()}


def check_value_model(config: RunConfig, policy: PreTrainedConfig, critic: PreTrainedConfig, layout: Layout) -> None:
    """Refuse a value model that cannot read what the policy reads, or cannot have this layout.

    Raises:
        ConfigError: names the numbers and what works.
    """
    vocab, needed = critic.get_text_config().vocab_size, policy.get_text_config().vocab_size
    if vocab < needed:
        raise ConfigError(
            key="critic.path" if config.critic.path else "critic.architecture",
            got=config.critic.path or config.critic.architecture,
            because=f"its vocabulary of {vocab} does not hold the policy's {needed} tokens",
            fix="Choose a value model with the policy's tokenizer",
        )
    check_positions(config, critic)
    check_layout(critic, layout)
