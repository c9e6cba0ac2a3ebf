"""Policies made of weights on disk or of random numbers, with all that the configuration asks for; and written again.

Before any of it a small model of the same kind is run as transformers runs it and as a policy does (``agreement.py``);
a family in which the two differ is refused. Leaves out what a policy does (``policy.py``), how transformers models are
made (``pretrained.py``) and how weights that stay on disk are read (``weights.py``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_utils,
)

from rlmodule.core.errors import ConfigError
from rlmodule.models.agreement import Agreement, SmallModels, check_agreement, numbers_as_stars
from rlmodule.models.alone import RowMode
from rlmodule.models.compiled import compile_blocks
from rlmodule.models.description import PRECISIONS, ModelConfig, load_model_config, source_of
from rlmodule.models.fp32 import compute_in_fp32
from rlmodule.models.lora import add_adapter, base_of, is_adapter, merge_start, plain_name
from rlmodule.models.output_head import UnknownHeadError
from rlmodule.models.policy import PolicyModel
from rlmodule.models.pretrained import (
    EAGER,
    attention_for,
    check_exists,
    check_reloads,
    check_unused,
    config_errors,
    lm_options,
    load_whole,
    random_lm,
    unused_note,
)
from rlmodule.models.reading import LOGPROBS
from rlmodule.models.recompute import recompute_activations
from rlmodule.models.weights import NotByNameError, build_on_meta, meta_parameters

SHARD_SIZE = "50GB"  # of a file of weights at most; transformers' own default


def build_policy(config: ModelConfig, *, seed: int, temperature: float) -> PolicyModel:
    """Load the weights in fp32, or draw random ones from ``seed`` without touching the global random state.

    Raises:
        ConfigError: it cannot be built, its files are not those of the model, or it would not be computed as its own
            forward does.
    """
    hf_config = load_model_config(config)
    found = check_family(hf_config, config)
    attention = attention_for(found.rows)
    with config_errors(config):
        if config.path is None:
            lm, note = random_lm(AutoModelForCausalLM, hf_config, config, seed, attention), ""
        else:
            path = base_of(config.path)
            lm, _, unused = load_whole(AutoModelForCausalLM, path, config, "model", attention=attention)
            note = unused_note(unused)
            if is_adapter(config.path):
                lm = merge_start(lm, config.path)
    return _policy_around(lm, config, seed, temperature, found, [note])


def build_policy_on_meta(config: ModelConfig, *, seed: int, temperature: float) -> PolicyModel:
    """As ``build_policy``, but weights that can be read one by one stay on disk for the strategy to read.

    All else is equal, bit for bit; ``loading`` says what was done, and why.
    """
    if config.path is None:
        return build_policy(config, seed=seed, temperature=temperature)
    hf_config = load_model_config(config)
    found = check_family(hf_config, config)
    try:
        if is_adapter(config.path):
            raise NotByNameError("an adapter is merged into it")
        with config_errors(config):
            options = lm_options(config, attention_for(found.rows))
            make = partial(AutoModelForCausalLM.from_config, hf_config, **options)
            lm, stored = build_on_meta(config.path, make)
    except NotByNameError as reason:
        policy = build_policy(config, seed=seed, temperature=temperature)
        policy.loading = joined([f"read whole by every process: {reason}", policy.loading])
        return policy
    check_unused(stored.unused, lm, config, "model")
    notes = ["read from disk block by block", unused_note(stored.unused)]
    with meta_parameters(lm):
        policy = _policy_around(lm, config, seed, temperature, found, notes)
    policy.stored = stored
    return policy


def _policy_around(
    lm: PreTrainedModel, config: ModelConfig, seed: int, temperature: float, found: Agreement, notes: Iterable[str]
) -> PolicyModel:
    """A policy around ``lm``, with checkpointing, adapters, frozen parts and compilation as configured."""
    compute_in_fp32(lm)
    recompute_activations(lm, config.activation_checkpointing, offload=config.activation_offload)
    if config.lora.is_on:
        base = (
            config.path if config.path is None or not Path(config.path).is_dir() else str(Path(config.path).absolute())
        )
        add_adapter(lm, config.lora, seed=seed, base=base)
    frozen = freeze(lm, found)
    if config.compile:
        compile_blocks(lm)
    policy = PolicyModel(
        lm,
        temperature=temperature,
        compute_dtype=PRECISIONS[config.precision],
        lora=config.lora if config.lora.is_on else None,
        compiled=config.compile,
        rows=found.rows,
    )
    policy.plain_blocks, policy.lacks_gradients = found.plain_blocks, found.lacks_gradients
    policy.loading = joined([*notes, frozen, found.note])
    return policy


def joined(notes: Iterable[str]) -> str:
    """The notes that are not empty, as one text."""
    return "; ".join(note for note in notes if note)


def freeze(lm: PreTrainedModel, found: Agreement) -> str:
    """Freeze what no text reaches and adapters without effect; returns a note for the run's plan.

    A gradient that never comes is an error in data-parallel training.
    """
    modules, parameters = dict(lm.named_modules()), dict(lm.named_parameters())
    unreached = [name for name in found.unreached if name in modules or name in parameters]
    for name in unreached:
        (modules.get(name) or parameters[name]).requires_grad_(False)
    for name, parameter in parameters.items():
        owner, is_adapter_part, _ = name.partition(".lora_")
        if is_adapter_part and numbers_as_stars(plain_name(owner)) in found.bypassed:
            parameter.requires_grad_(False)
    return joined(
        f"{what}: {', '.join(names)}"
        for what, names in (
            ("frozen, as no text reaches it", unreached),
            ("adapters without effect, as the model reads the weight itself", found.bypassed),
        )
        if names
    )


# ---- whether a family is computed as its own forward does


def check_family(hf_config: PreTrainedConfig, config: ModelConfig) -> Agreement:
    """Refuse a model that would not be computed as its own forward does, or whose adapters could not be merged.

    Raises:
        ConfigError: names the kind of model and the reason.
    """
    return check_agreement(hf_config, config, "model", small_models(config), LOGPROBS)


def small_models(config: ModelConfig) -> SmallModels[PolicyModel]:
    """How to make the models that are compared, with the adapters of ``config``."""
    auto = AutoModelForCausalLM

    def stock(hf_config: PreTrainedConfig) -> PreTrainedModel:
        check_exists(hf_config, auto, config)
        lm = random_lm(auto, hf_config, config, seed=0, attention=EAGER)
        check_reloads(lm, auto, config)
        return lm

    def policy(hf_config: PreTrainedConfig, rows: RowMode) -> PolicyModel:
        lm = random_lm(auto, hf_config, config, seed=0, attention=attention_for(rows))
        try:
            return PolicyModel(lm, rows=rows)
        except UnknownHeadError as error:
            raise ConfigError(
                **source_of(config),
                because=f"{type(lm).__name__} cannot be trained: {error}",
                fix="Choose a causal LM whose logits are a linear layer of its last hidden states",
            ) from error

    adapt = partial(add_adapter, config=config.lora, seed=0, base=None) if config.lora.is_on else None
    return SmallModels(stock, policy, adapt)


def parameter_count(model: nn.Module) -> int:
    """Parameters of a model, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def save_pretrained(
    folder: Path,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, Tensor] | None = None,
    *,
    shard_size: str = SHARD_SIZE,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads.

    Args:
        folder: where to.
        lm: gives the configuration.
        tokenizer: is written beside it.
        weights: replace the module's own.
        shard_size: of one file of weights at most.
    """
    with _known_to_be_unwrapped():
        lm.save_pretrained(folder, state_dict=None if weights is None else dict(weights), max_shard_size=shard_size)
    if weights is not None:
        _state_dtype(folder / "config.json", weights)
    tokenizer.save_pretrained(folder)


@contextmanager
def _known_to_be_unwrapped() -> Iterator[None]:
    """Inside, transformers does not ask what a model is wrapped in.

    It does so before it writes one, by way of accelerate, which imports DeepSpeed for it wherever that is installed:
    1.7 CPU seconds at the end of every run.
    """
    before = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = lambda model, recursive=False: model  # type: ignore[assignment]
    try:
        yield
    finally:
        modeling_utils.unwrap_model = before


def _state_dtype(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Let a written configuration name the type that most weights have: transformers writes that of the module."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    described = json.loads(path.read_text(encoding="utf-8"))
    described["dtype"] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    path.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
