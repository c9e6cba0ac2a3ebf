"""Policies made of weights on disk or of random numbers, with all that the configuration asks for; and written again.

Leaves out what a policy does (``policy.py``) and how weights that stay on disk are read (``weights.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlmodule.core.errors import ConfigError
from rlmodule.models.attention import ATTENTION
from rlmodule.models.compiled import compile_blocks
from rlmodule.models.description import PRECISIONS, ModelConfig, first_line, load_model_config
from rlmodule.models.lora import add_adapter, base_of, is_adapter, merge_start
from rlmodule.models.policy import PolicyModel
from rlmodule.models.recompute import recompute_activations
from rlmodule.models.weights import NotByNameError, StoredWeights, build_on_meta, meta_parameters

PACKED_LAYERS = {"full_attention", "sliding_attention"}  # kinds of layers that can be told where a sample ends


def build_policy(config: ModelConfig, *, seed: int, temperature: float) -> PolicyModel:
    """Load the weights in fp32, or draw random ones from ``seed`` without touching the global random state."""
    return _policy_around(_whole_lm(config, seed), config, seed, temperature)


def build_policy_on_meta(config: ModelConfig, *, seed: int, temperature: float) -> PolicyModel:
    """``build_policy``, but weights that can be read one by one are left on disk for the strategy to read.

    What is not left there is the same, number by number; ``loading`` says what was done, and why.
    """
    if config.path is None:
        return build_policy(config, seed=seed, temperature=temperature)
    try:
        lm, stored = _outlined_lm(config)
    except NotByNameError as reason:
        policy = build_policy(config, seed=seed, temperature=temperature)
        policy.loading = f"read whole by every process: {reason}"
        return policy
    with meta_parameters(lm):
        policy = _policy_around(lm, config, seed, temperature)
    policy.stored, policy.loading = stored, "read from disk block by block"
    return policy


def _outlined_lm(config: ModelConfig) -> tuple[PreTrainedModel, StoredWeights]:
    assert config.path is not None, "a random model has nothing on disk"
    if is_adapter(config.path):
        raise NotByNameError("an adapter is merged into it")
    hf_config = load_model_config(config)
    with said_of(config):
        return build_on_meta(config.path, lambda: AutoModelForCausalLM.from_config(hf_config, **lm_options(config)))


def _whole_lm(config: ModelConfig, seed: int) -> PreTrainedModel:
    with said_of(config):
        if config.path is None:
            return random_lm(AutoModelForCausalLM, load_model_config(config), config, seed)
        lm = AutoModelForCausalLM.from_pretrained(base_of(config.path), **lm_options(config))
    return merge_start(lm, config.path) if is_adapter(config.path) else lm


def random_lm(auto: Any, hf_config: PreTrainedConfig, config: ModelConfig, seed: int) -> PreTrainedModel:
    """A model of transformers' class ``auto`` with random weights; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(hf_config, **lm_options(config))


def lm_options(config: ModelConfig) -> dict[str, Any]:
    """How every transformers model of a run is made: fp32 weights, our attention."""
    return {
        "attn_implementation": ATTENTION,
        "dtype": torch.float32,
        "trust_remote_code": config.trust_remote_code,
    }


@contextmanager
def said_of(config: ModelConfig, section: str = "model") -> Iterator[None]:
    """Inside, what transformers cannot build or find is the user's error; ``section`` names the model."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(
            key=f"{section}.path" if config.path else f"{section}.architecture",
            got=config.path or config.architecture.get("model_type"),
            because=f"the model cannot be built ({first_line(error)})",
            fix="Choose a causal LM whose attention goes through transformers' attention interface",
        ) from error


def _policy_around(lm: PreTrainedModel, config: ModelConfig, seed: int, temperature: float) -> PolicyModel:
    """Put in what the configuration asks for, and a policy around it."""
    check_attention_is_ours(lm, config)
    recompute_activations(lm, config.activation_checkpointing, offload=config.activation_offload)
    if config.lora.is_on:
        base = (
            config.path if config.path is None or not Path(config.path).is_dir() else str(Path(config.path).absolute())
        )
        add_adapter(lm, config.lora, seed=seed, base=base)
    if config.compile:
        compile_blocks(lm)
    return PolicyModel(
        lm,
        temperature=temperature,
        compute_dtype=PRECISIONS[config.precision],
        lora=config.lora if config.lora.is_on else None,
        compiled=config.compile,
    )


def check_attention_is_ours(lm: PreTrainedModel, config: ModelConfig) -> None:
    """Refuse a model in which packed samples would see each other: attention of its own, or a state that runs along."""
    foreign = set(getattr(lm.config.get_text_config(), "layer_types", None) or ()) - PACKED_LAYERS
    if lm._supports_attention_backend and not lm._is_stateful and not foreign:
        return
    raise ConfigError(
        key="model.path" if config.path else "model.architecture.model_type",
        got=config.path or config.architecture.get("model_type"),
        because=f"{type(lm).__name__} has {', '.join(sorted(foreign)) or 'attention of its own'}, "
        "in which samples laid end to end would see each other",
        fix="Choose a causal LM whose attention goes through transformers' attention interface in every layer",
    )


def parameter_count(model: nn.Module) -> int:
    """Parameters of a model, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def save_pretrained(
    folder: Path, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads; ``weights`` replace the module's own."""
    lm.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
    tokenizer.save_pretrained(folder)
