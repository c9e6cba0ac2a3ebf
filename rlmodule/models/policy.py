"""A policy: any Hugging Face causal LM that says log-probabilities of loss tokens, and next-token logits for sampling.

Leaves out where the model sits (``strategies/``) and what is done with its answers (``objective.py``, ``rollout/``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlmodule.batching.workload import ModelShape
from rlmodule.core.config import one_of
from rlmodule.core.contract import SequenceRanks, TokenObjective
from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.types import MicroBatch, TokenOutputs
from rlmodule.models.attention import ATTENTION, RaggedCache, Rows
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.compiled import compile_blocks
from rlmodule.models.hub import prefer_cache_if_unreachable
from rlmodule.models.lora import LoraSettings, add_adapter, base_of, is_adapter, merge_start, without_adapter
from rlmodule.models.recompute import FULL, NONE, recompute_activations
from rlmodule.models.recompute import MODES as RECOMPUTE_MODES
from rlmodule.models.weights import NotByNameError, StoredWeights, outline, stand_ins
from rlmodule.ops.attention import SegmentBuckets
from rlmodule.ops.head import linear_logprobs, linear_loss

PRECISIONS: Mapping[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16}
NO_VALUE, SHARED, SEPARATE, ONLY = VALUES = ("none", "shared", "separate", "only")
DRAWN_IN_TRAINING = {"phimoe"}  # families whose train mode samples where their eval mode chooses
PACKED_LAYERS = {"full_attention", "sliding_attention"}  # kinds of layers that can be told where a sample ends


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
    lora: LoraSettings = field(default_factory=LoraSettings)  # low-rank adapters instead of every weight
    value: str = NO_VALUE  # PPO: shared (a head on the policy) or separate (a model); only: a reward model, no policy

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        one_of("value", self.value, VALUES)
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
                fix="Set model.path=FOLDER, or choose model=tiny",
            )


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
    except (OSError, ValueError) as error:
        raise ConfigError(
            key="model.tokenizer" if config.tokenizer else "model.path",
            got=place,
            because=f"no tokenizer can be read there ({first_line(error)})",
            fix="Give a folder that holds tokenizer.json, or a name the hub cache knows",
        ) from error


def load_model_config(config: ModelConfig, section: str = "model") -> PreTrainedConfig:
    """The model's own description, read without its weights; for checks before anything big is loaded.

    ``section`` of the configuration it is named in, for errors.

    Raises:
        ConfigError: nothing there, an unknown architecture, or one that cannot be trained here.
    """
    found = _described(config, section)
    if found.model_type in DRAWN_IN_TRAINING:
        raise ConfigError(
            key=f"{section}.path" if config.path else f"{section}.architecture.model_type",
            got=config.path or found.model_type,
            because=f"{found.model_type} draws its experts at random while it trains, so the update would see another "
            "network than the one that gave the old log-probabilities",
            fix="Choose another model",
        )
    return found


def _described(config: ModelConfig, section: str) -> PreTrainedConfig:
    if config.path is not None:
        base = base_of(config.path)
        prefer_cache_if_unreachable(base)
        try:
            return AutoConfig.from_pretrained(base, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                key=f"{section}.path",
                got=config.path,
                because=f"no model configuration can be read there ({first_line(error)})",
                fix="Give a folder that holds config.json and safetensors files, or a name that the hub's cache knows "
                "or the hub can be asked for",
            ) from error
    values = dict(config.architecture)
    model_type = str(values.pop("model_type", ""))
    try:
        made = AutoConfig.for_model(model_type, **values)
    except ValueError:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        raise ConfigError(
            key=f"{section}.architecture.model_type",
            got=model_type,
            because="transformers knows no such model",
            fix=did_you_mean(model_type, CONFIG_MAPPING),
        ) from None
    unknown = [name for name in values if not hasattr(type(made)(), name)]
    if unknown:
        raise ConfigError(
            key=f"{section}.architecture.{unknown[0]}",
            got=values[unknown[0]],
            because=f"{model_type} has no such setting",
            fix=did_you_mean(unknown[0], type(made)().to_dict()),
        )
    return made


def build_policy(config: ModelConfig, *, seed: int, temperature: float) -> PolicyModel:
    """Load the weights in fp32, or draw random ones from ``seed`` without touching the global random state."""
    return _policy_around(_whole_lm(config, seed), config, seed, temperature)


def outline_policy(config: ModelConfig, *, seed: int, temperature: float) -> PolicyModel:
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
    with stand_ins(lm):
        policy = _policy_around(lm, config, seed, temperature)
    policy.stored, policy.loading = stored, "read from disk block by block"
    return policy


def _outlined_lm(config: ModelConfig) -> tuple[PreTrainedModel, StoredWeights]:
    assert config.path is not None, "a random model has nothing on disk"
    if is_adapter(config.path):
        raise NotByNameError("an adapter is merged into it")
    hf_config = load_model_config(config)
    with said_of(config):
        return outline(config.path, lambda: AutoModelForCausalLM.from_config(hf_config, **lm_options(config)))


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
    refuse_leaks(lm, config)
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


def refuse_leaks(lm: PreTrainedModel, config: ModelConfig) -> None:
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


@dataclass(frozen=True, eq=False)
class PrefillBatch:
    """Prompts end to end, to be read into an empty cache: ``input_ids`` and ``position_ids`` [T], ``last`` [B]."""

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    last: Tensor
    cache: RaggedCache


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """One new token per row of a cache. ``input_ids`` [B]."""

    input_ids: Tensor
    cache: RaggedCache


class PolicyModel(nn.Module):
    """Wraps a causal LM; every use of its weights goes through ``forward`` so that any strategy can wrap it.

    Args:
        lm: causal LM in fp32, attention set to the project's own.
        temperature: divides logits in scoring and sampling alike.
        compute_dtype: matmuls run in it under autocast; None computes in the weights' own type.
        lora: settings of the adapters in it, None where every weight trains.
        compiled: whether its blocks are compiled; sampling then steps around that.

    Attributes:
        sequence: ranks that share a packed row, set by the strategy; scoring and training then see a slice of it, while
            sampling runs whole rows on every rank.
        stored: where parameters on the meta device are to be read from, None where there are none.
        loading: how the weights come from disk, in words; empty where they do not.
    """

    lm: PreTrainedModel
    sequence: SequenceRanks | None = None
    stored: StoredWeights | None = None
    loading: str = ""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        temperature: float = 1.0,
        compute_dtype: torch.dtype | None = None,
        lora: LoraSettings | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.lora = lora
        self.compiled = compiled
        self.lm = lm
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.head = HeadScaling.of(lm.config)
        silence_dropout(lm)

    def forward(
        self,
        batch: MicroBatch | PrefillBatch | DecodeBatch,
        *,
        objective: TokenObjective | None = None,
        with_entropy: bool = False,
        with_energy: bool = False,
        with_adapter: bool = True,
    ) -> Tensor | TokenOutputs:
        """A micro-batch with an objective -> scalar loss; without -> TokenOutputs of its loss tokens, no gradients.

        A PrefillBatch or a DecodeBatch -> [B, V] next-token logits. Without its adapter a policy is the model that
        training started from.
        """
        device = batch.input_ids.device.type
        with ExitStack() as state:
            state.enter_context(
                torch.autocast(device, dtype=self.compute_dtype, enabled=self.compute_dtype is not None)
            )
            if not with_adapter:
                assert self.lora is not None, "there is no adapter to leave out"
                state.enter_context(without_adapter(self.lm))
            if isinstance(batch, MicroBatch):
                hidden = packed_hidden(self.lm, batch, self.sequence)[batch.loss_positions]
                asked = {"with_entropy": with_entropy, "with_energy": with_energy}
                return self.answer(hidden, batch.labels, objective, **asked)
            if self.compiled:
                state.enter_context(torch.compiler.set_stance("force_eager"))
            return self._prefill(batch) if isinstance(batch, PrefillBatch) else self._decode(batch)

    def answer(
        self,
        hidden: Tensor,
        labels: Tensor,
        objective: TokenObjective | None,
        *,
        with_entropy: bool,
        with_energy: bool,
    ) -> Tensor | TokenOutputs:
        """[N, H] hidden states at the positions that predict ``labels`` [N] -> the objective, or what it is made of."""
        head = self.lm.get_output_embeddings()
        hidden = hidden * self.head.scale
        options: dict[str, Any] = {"bias": head.bias, "temperature": self.temperature, "softcap": self.head.softcap}
        if objective is None:
            options |= {"with_entropy": with_entropy, "with_energy": with_energy}
            return linear_logprobs(hidden, head.weight, labels, **options)
        options |= {"with_entropy": objective.needs_entropy, "whole_sequences": objective.whole_sequences}
        return linear_loss(hidden, head.weight, labels, objective, **options)

    def _prefill(self, batch: PrefillBatch) -> Tensor:
        segments = SegmentBuckets.from_cu_seqlens(batch.cu_seqlens)
        lengths = batch.cu_seqlens.diff()
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        batch.cache.writing = Rows(row=rows, place=batch.position_ids)
        hidden = hidden_states(
            self.lm,
            batch.input_ids[None],
            batch.position_ids[None],
            segments=segments,
            cache=batch.cache,
            use_cache=True,
        )
        batch.cache.writing = None
        return self._logits(hidden[0, batch.last])

    def _decode(self, batch: DecodeBatch) -> Tensor:
        cache = batch.cache
        hidden = hidden_states(
            self.lm,
            batch.input_ids[:, None],
            cache.lengths[:, None],
            key_lengths=cache.lengths + 1,
            cache=cache,
            use_cache=True,
        )
        cache.advance()
        return self._logits(hidden[:, 0])

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, H] -> [B, V] fp32 logits, temperature applied."""
        logits = self.lm.get_output_embeddings()(hidden * self.head.scale).float()
        if self.head.softcap is not None:
            logits = self.head.softcap * torch.tanh(logits / self.head.softcap)
        return logits / self.temperature


def packed_hidden(lm: PreTrainedModel, batch: MicroBatch, sequence: SequenceRanks | None) -> Tensor:
    """[T, H] last hidden states of a packed row, of which ``sequence`` ranks each hold a slice."""
    segments = SegmentBuckets.from_cu_seqlens(batch.cu_seqlens, batch.input_ids.device, batch.prefix)
    return hidden_states(lm, batch.input_ids[None], batch.position_ids[None], segments=segments, sequence=sequence)[0]


def hidden_states(
    lm: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, **kwargs: Any
) -> Tensor:
    """[B, T] ids -> [B, T, H] last hidden states; further keywords reach the attention."""
    # use_cache must be said: left out, transformers makes a cache and packed samples attend to each other.
    return lm.base_model(  # type: ignore[no-any-return]
        input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs
    ).last_hidden_state


@dataclass(frozen=True)
class HeadScaling:
    """What some families do between the last hidden state and the softmax.

    Args:
        scale: factor on the logits.
        softcap: logits become softcap * tanh(logits / softcap).
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> HeadScaling:
        """Read it off a model's configuration (Gemma 2: softcap; Cohere: logit_scale; Granite: logits_scaling)."""
        values = config.get_text_config().to_dict()
        scale = float(values.get("logit_scale") or 1.0) / float(values.get("logits_scaling") or 1.0)
        return cls(scale, values.get("final_logit_softcapping"))


def silence_dropout(model: nn.Module) -> None:
    """Set every dropout and jitter of ``model`` to 0, module or functional; its configuration (and its export) stays.

    eval() would do too, but it also switches off activation checkpointing.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """The sizes that decide what a token costs."""
    text = config.get_text_config()

    def value(
        name: str,
    ) -> Any:  # not from to_dict(): older families have names of their own, which attributes translate
        return getattr(text, name, None)

    heads, hidden, layers = (int(value(n)) for n in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kinds = value("layer_types") or []
    window = value("sliding_window")
    windowed = sum(kind == "sliding_attention" for kind in kinds) if kinds else (layers if window else 0)
    experts = value("num_experts_per_tok")
    inner = value("moe_intermediate_size") if experts else None
    return ModelShape(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(value("num_key_value_heads") or heads),
        head_dim=int(value("head_dim") or hidden // heads),
        intermediate_size=int(inner or value("intermediate_size") or 4 * hidden),
        vocab_size=int(value("vocab_size")),
        num_experts_per_token=int(experts or 1),
        sliding_window=int(window) if window and windowed else None,
        num_windowed_layers=windowed if window else 0,
    )


def positions_of(config: PreTrainedConfig) -> int | None:
    """Tokens a sample may have at most, None where the model sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def parameter_count(model: nn.Module) -> int:
    """Parameters of a model, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def save_pretrained(
    folder: Path, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads; ``weights`` replace the module's own."""
    lm.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
    tokenizer.save_pretrained(folder)


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
