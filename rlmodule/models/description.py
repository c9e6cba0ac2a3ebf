"""Which model is meant, and what its files say of it without its weights: configuration, tokenizer, limits.

Leaves out the model itself (``building.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError, did_you_mean, in_one_line
from rlmodule.core.hub import prefer_cache_if_unreachable
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.lora import LoraConfig, base_of
from rlmodule.models.quantized import check_kind_of_weights
from rlmodule.models.recompute import FULL, NONE
from rlmodule.models.recompute import MODES as RECOMPUTE_MODES

PRECISIONS: Mapping[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16}
POLICY_KIND, REWARD_MODEL_KIND = KINDS = ("policy", "reward_model")
NO_VALUE, SHARED, SEPARATE = VALUES = ("none", "shared", "separate")
DRAWN_IN_TRAINING = {"phimoe"}  # families whose train mode samples where their eval mode chooses


@dataclass(frozen=True)
class ModelConfig:
    """Which model to train: weights from ``path``, or a random one described by ``architecture``."""

    path: str | None = None  # local folder or hub name of a causal LM
    architecture: dict[str, Any] = field(default_factory=dict)  # model_type and config values of a random model
    tokenizer: str | None = None  # folder, hub name or 'byte'; None takes the one beside the weights
    precision: str = "32-true"  # 32-true, or bf16-mixed: fp32 weights, bf16 matmuls
    trust_remote_code: bool = False  # run model code that comes with the weights
    activation_checkpointing: str = NONE  # none, full or selective: activations made again in backward instead of kept
    activation_offload: bool = False  # inputs of blocks wait in host memory; with activation_checkpointing=full
    compile: bool = False  # compile the blocks; for long runs on an accelerator
    lora: LoraConfig = field(default_factory=LoraConfig)  # low-rank adapters instead of every weight
    kind: str = POLICY_KIND  # policy, or reward_model: a model that gives one score per response
    value: str = NO_VALUE  # value function of PPO: none, shared (a head on the policy) or separate (a model)
    lr: float | None = None  # peak learning rate of all weights that fits this model; null: by its size
    sft_lr: float | None = None  # likewise for demonstrations, and of a reward model; null: by its size
    value_lr: float | None = None  # likewise of a separate value model; null: by its size
    warmup_steps: int = 5  # optimizer steps of warm-up that fit it; what optimizer.warmup_steps is unless set itself
    checkpoint_every: int = 1  # iterations between checkpoints; callbacks.checkpoint.every_n_iterations follows it
    shape: dict[str, Any] = field(default_factory=dict)  # what config.json at path says, for planning without the files

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        for name in ("lr", "sft_lr", "value_lr"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 0)
        at_least("warmup_steps", self.warmup_steps, 0)
        at_least("checkpoint_every", self.checkpoint_every, 1)
        one_of("kind", self.kind, KINDS)
        one_of("value", self.value, VALUES)
        if self.is_reward_model and self.value != NO_VALUE:
            raise ConfigError(
                key="value",
                got=self.value,
                because="a value function belongs to a policy, and model.kind=reward_model trains none",
                fix="Use model.value=none, or model.kind=policy",
            )
        one_of("activation_checkpointing", self.activation_checkpointing, RECOMPUTE_MODES)
        if self.activation_offload and self.activation_checkpointing != FULL:
            raise ConfigError(
                key="activation_offload",
                got=True,
                because=f"with activation_checkpointing={self.activation_checkpointing} blocks keep more than their "
                "inputs, weights that a strategy gathers among it, and all of it would travel",
                fix="Use model.activation_checkpointing=full, or model.activation_offload=false",
            )
        if self.compile and self.activation_checkpointing != NONE:
            raise ConfigError(
                key="compile",
                got=True,
                because="a compiled block cannot be made again in backward, as "
                f"activation_checkpointing={self.activation_checkpointing} wants it",
                fix="Use model.compile=false, or model.activation_checkpointing=none",
            )
        if (self.path is None) == (not self.architecture):
            raise ConfigError(
                key="path",
                got=self.path,
                because="a model comes either from a path or from an architecture, and exactly one must be given",
                fix="Choose model=local model.path=FOLDER, or model=tiny",
            )

    @property
    def is_reward_model(self) -> bool:
        """Whether a reward model is trained instead of a policy."""
        return self.kind == REWARD_MODEL_KIND


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model; ``byte`` is built in.

    Raises:
        ConfigError: no tokenizer can be read there.
    """
    if config.tokenizer == "byte" or (config.tokenizer is None and config.path is None):
        return byte_tokenizer()
    place = config.tokenizer or config.path
    assert place is not None
    prefer_cache_if_unreachable(place)
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # damaged files fail in many ways: KeyError, AttributeError, the library's own
        raise ConfigError(
            key="model.tokenizer" if config.tokenizer else "model.path",
            got=place,
            because=f"no tokenizer can be read there ({first_line(error)})",
            fix="Give a folder that holds tokenizer.json, or a name the hub cache knows",
        ) from error


def load_model_config(config: ModelConfig, section: str = "model") -> PreTrainedConfig:
    """The transformers configuration, read without weights; for checks before anything big is loaded.

    ``section`` is where the model stands in the run's configuration, for errors.

    Raises:
        ConfigError: nothing there, an unknown architecture, or one that cannot be trained here.
    """
    if config.path is None:
        found = _of_architecture(config.architecture, section)
    else:
        found = _of_files(config.path, config.trust_remote_code, section)
    check_kind_of_weights(found, **source_of(config, section))
    if found.model_type in DRAWN_IN_TRAINING:
        raise ConfigError(
            key=f"{section}.path" if config.path else f"{section}.architecture.model_type",
            got=config.path or found.model_type,
            because=f"{found.model_type} draws its experts at random while it trains, so the update would see another "
            "network than the one that gave the old log-probabilities",
            fix="Choose another model",
        )
    return found


def _of_files(path: str, trust_remote_code: bool, section: str) -> PreTrainedConfig:
    base = base_of(path)
    if base.startswith(("/", "./", "../", "~")) and not os.path.exists(base):
        raise ConfigError(
            key=f"{section}.path",
            got=path,
            because="no model configuration can be read there (there is no such folder"
            + ("; ~ stands for no home here, write the whole path)" if base.startswith("~") else ")"),
            fix="Give a folder that holds config.json and safetensors files, or the name of a model on the hub",
        )
    prefer_cache_if_unreachable(base)
    try:
        return AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)  # type: ignore[no-any-return]
    except Exception as error:  # each family checks its values in a way of its own
        raise ConfigError(
            key=f"{section}.path",
            got=path,
            because=f"no model configuration can be read there ({first_line(error)})",
            fix="Give a folder that holds config.json and safetensors files, or a name that the hub's cache knows "
            "or the hub offers",
        ) from error


def _of_architecture(architecture: Mapping[str, Any], section: str) -> PreTrainedConfig:
    values = dict(architecture)
    model_type = str(values.pop("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            key=f"{section}.architecture.model_type",
            got=model_type,
            because="transformers knows no such model",
            fix=did_you_mean(model_type, CONFIG_MAPPING),
        )
    try:
        made = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # each family checks its values in a way of its own
        raise ConfigError(
            key=f"{section}.architecture",
            got=model_type,
            because=f"no configuration can be made of these values ({' '.join(str(error).split())})",
            fix="Compare them with the configuration of a published model of this kind",
        ) from error
    defaults = _defaults(type(made))
    # What a family knows, but makes something else of, leaves no attribute; what it does not know does.
    kept = vars(made).keys() & values.keys()
    unknown = [name for name in values if name in kept and defaults is not None and not hasattr(defaults, name)]
    if defaults is not None and unknown:
        raise ConfigError(
            key=f"{section}.architecture.{unknown[0]}",
            got=values[unknown[0]],
            because=f"{model_type} has no such setting",
            fix=did_you_mean(unknown[0], defaults.to_dict()),
        )
    return made


def generation_end_tokens(config: ModelConfig) -> tuple[int, ...]:
    """End tokens that the model's ``generation_config.json`` names; none for a model without one."""
    if config.path is None:
        return ()
    try:
        found: Any = GenerationConfig.from_pretrained(base_of(config.path)).eos_token_id
    except Exception as error:  # no such file, or a damaged one
        if not os.path.isfile(os.path.join(base_of(config.path), GENERATION_CONFIG_NAME)):
            return ()
        found = in_one_line(error)
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in ends):
        raise ConfigError(
            key="model.path",
            got=config.path,
            because=f"its generation_config.json does not name end tokens by their ids ({found})",
            fix="Correct eos_token_id there, or delete the file",
        )
    return tuple(ends)


def _defaults(kind: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    """A configuration with every value at its default, None for the families that have no such thing."""
    try:
        made = kind()
        made.allow_global_per_layer_attribute_access = True  # else asking for what differs between layers is an error
        return made
    except Exception:  # each family checks its values in a way of its own
        return None


@dataclass(frozen=True)
class RotaryLimit:
    """Up to how many tokens a sample's rotary frequencies do not depend on what else is in its row.

    Args:
        tokens: of a sample.
        kind: transformers' name of the way to extend rotary positions.
    """

    tokens: int
    kind: str


def rotary_limit(config: PreTrainedConfig) -> RotaryLimit | None:
    """The limit of a family that chooses frequencies by the longest sample of a row, None for all others.

    ``longrope`` (arXiv:2402.13753) has two sets of them, ``dynamic`` makes new ones with every length
    (https://github.com/huggingface/transformers/pull/24653).
    """
    text = config.get_text_config()
    parameters: Any = getattr(text, "rope_parameters", None) or {}
    of_kinds = [one for one in parameters.values() if isinstance(one, dict)] or [parameters]  # of each kind of layer
    limits = []
    for one in of_kinds:
        kind = one.get("rope_type", "default")
        if kind == "longrope":
            limits.append(RotaryLimit(int(one["original_max_position_embeddings"]), kind))
        elif "dynamic" in kind:
            limits.append(RotaryLimit(int(text.max_position_embeddings), kind))
    return min(limits, key=lambda limit: limit.tokens, default=None)


def positions_of(config: PreTrainedConfig) -> int | None:
    """Tokens a sample may have at most, None where the model sets no limit."""
    positions, rotary = getattr(config.get_text_config(), "max_position_embeddings", None), rotary_limit(config)
    return positions if rotary is None else min(positions or rotary.tokens, rotary.tokens)


def positions_in_words(config: PreTrainedConfig) -> str:
    """The limit of ``positions_of`` for error messages, to follow "the model has"."""
    rotary = rotary_limit(config)
    behind = "" if rotary is None else f" before its rotary frequencies change for a whole row ({rotary.kind})"
    return f"{positions_of(config)} positions{behind}"


def source_of(config: ModelConfig, section: str = "model") -> dict[str, Any]:
    """``key`` and ``got`` of an error about the model itself; ``section`` of the configuration names it."""
    if config.path is not None:
        return {"key": f"{section}.path", "got": config.path}
    return {"key": f"{section}.architecture.model_type", "got": config.architecture.get("model_type")}


def first_line(error: Exception) -> str:
    """The first line of an error's message that is not empty, and those that it announces; else the error's class."""
    said = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        said = f"{said} {line}".strip()
        if not said.endswith(":"):
            break
    return said or type(error).__name__
