"""A model whose files are not on this machine, as ``model.shape`` describes it: values of its published config.json.

Files that are here decide, and where they say something else than ``model.shape`` it is told. Leaves out files that
have to be fetched (``description.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.hub import is_cached
from rlmodule.models.description import ModelConfig, load_model_config
from rlmodule.models.lora import base_of


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """A model's configuration, and where it is from.

    Args:
        config: transformers' configuration.
        source: where it was read, in words.
        differences: what the files say otherwise than ``model.shape``.
    """

    config: PreTrainedConfig
    source: str
    differences: tuple[str, ...] = ()


def describe_model(model: ModelConfig) -> DescribedModel:
    """The configuration of a model without fetching anything, where that is possible.

    Raises:
        ConfigError: nothing describes the model, or what does cannot be understood.
    """
    if model.path is None:
        return DescribedModel(load_model_config(model), "model.architecture")
    base = base_of(model.path)
    if model.shape and not Path(base).exists() and not is_cached(base):
        return DescribedModel(config_of_shape(model.shape), "model.shape, as its files are not on this machine")
    config = load_model_config(model)
    return DescribedModel(config, f"config.json of {base}", tuple(differences(model.shape, config)))


def config_of_shape(shape: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of published values.

    Raises:
        ConfigError: transformers knows no such family, or cannot make anything of the values.
    """
    values = dict(shape)
    model_type = str(values.pop("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            key="model.shape.model_type",
            got=model_type,
            because="transformers knows no such model",
            fix=did_you_mean(model_type, CONFIG_MAPPING),
        )
    try:
        return AutoConfig.for_model(model_type, **values)  # type: ignore[no-any-return]
    except Exception as error:  # each family checks its values in a way of its own
        raise ConfigError(
            key="model.shape",
            got=model_type,
            because=f"no configuration can be made of these values ({' '.join(str(error).split())})",
            fix="Copy them from the model's config.json",
        ) from error


def differences(shape: Mapping[str, Any], config: PreTrainedConfig) -> Iterator[str]:
    """``key: files say a, model.shape b`` for every published value that the files have otherwise."""
    for key, value in shape.items():
        found = getattr(config, key, None)
        if isinstance(value, Mapping) and isinstance(found, PreTrainedConfig):
            yield from (f"{key}.{line}" for line in differences(value, found))
        elif found != value:
            yield f"{key}: its files say {found}, model.shape says {value}"
