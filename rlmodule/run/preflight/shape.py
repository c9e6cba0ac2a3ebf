"""Whether the sizes in a model's configuration can be those of a model, and of one that this machine can hold."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from rlmodule.core.errors import ConfigError
from rlmodule.run.config import RunConfig

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
# Those that some published families have as 0 without harm.
OWN_SIZES = ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")
SPECIAL_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
ELEMENTS = 2**40  # of one tensor; no model that anybody trains has one of as many


def check_shape(config: RunConfig, hf_config: PreTrainedConfig) -> None:
    """Sizes are positive, query heads share key-value heads evenly, special tokens are tokens.

    Raises:
        ConfigError: names the value in the model's configuration.
    """
    text = hf_config.get_text_config()
    sizes = {name: _number(text, name) for name in SIZES}
    own = {name: _number(text, name) for name in OWN_SIZES if name in config.model.architecture}
    for name, size in {**sizes, **own}.items():
        if size is not None and size < 1:
            raise _wrong(config, name, size, "it must be at least 1", f"Set model.architecture.{name}=1 or more")
    heads, kv_heads = sizes["num_attention_heads"], _number(text, "num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise _wrong(
            config,
            "num_attention_heads",
            heads,
            f"num_key_value_heads={kv_heads} does not divide it",
            f"Use a multiple of {kv_heads}",
        )
    hidden, tokens = sizes["hidden_size"], sizes["vocab_size"]
    if hidden and tokens and hidden * tokens > ELEMENTS:
        because = f"an embedding of vocab_size={tokens} times hidden_size={hidden} numbers fits no machine"
        raise _wrong(config, "vocab_size", tokens, because, "Lower one of the two")
    for name in set(SPECIAL_TOKENS) & set(config.model.architecture):  # published ones may be wrong without harm
        _check_token(config, name, config.model.architecture[name], tokens)


def _check_token(config: RunConfig, name: str, value: Any, tokens: int | None) -> None:
    for token in value if isinstance(value, list) else [value]:
        if tokens is not None and isinstance(token, int) and not -1 <= token < tokens:  # -1 says that there is none
            because = f"the model knows tokens 0 to {tokens - 1}"
            raise _wrong(config, name, token, because, "Name one of them, or null for none")


def _number(config: PreTrainedConfig, name: str) -> int | None:
    """A size by its common name; None where a family has none, or one for each layer."""
    value = vars(config).get(config.attribute_map.get(name, name))
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _wrong(config: RunConfig, name: str, got: object, because: str, fix: str) -> ConfigError:
    if config.model.path is None:
        return ConfigError(key=f"model.architecture.{name}", got=got, because=because, fix=fix)
    because = f"its configuration says {name}={got}, and {because}"
    return ConfigError(key="model.path", got=config.model.path, because=because, fix="Give the model as published")
