"""The cost model of a transformers model, from a forward pass on the meta device: no weights and no arithmetic.

The pass counts the matrix products that the model's own code asks for, so latent attention, shared experts, dense first
layers, MLPs with and without a gate and linear attention need no rule of their own. Layers that are built alike are run
once. A model whose forward pass depends on values (some routers do) is estimated from the sizes of its parameters.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlmodule.batching.workload import AttentionShape, ModelShape
from rlmodule.models.attention import TRACED_ATTENTION, AttentionCall, trace_attention
from rlmodule.models.state_layers import state_layers

# Tokens of the traced pass: whole chunks of linear attention, which works on 64, 128 or 256 tokens at a time.
TRACED_TOKENS = 256
# An implementation of fused experts that gathers the active ones: its products depend on no value.
TRACED_EXPERTS = "batched_mm"
# What a Mamba 2 layer calls its sizes, whatever the family.
STATE_SPACE_SIZES = ("num_heads", "n_groups", "ssm_state_size", "chunk_size")
# Names under which families keep the number of experts of a token.
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")

_shapes: dict[str, ModelShape] = {}  # by configuration, because every iteration asks again


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """Read off a model's configuration what its tokens cost; takes a fraction of a second for models of any size."""
    key = config.to_json_string(use_diff=False)
    if key not in _shapes:
        try:
            _shapes[key] = _traced_shape(config)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError):
            _shapes[key] = _estimated_shape(config)
    return _shapes[key]


def model_on_meta(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """The causal LM of a configuration without weights."""
    own_code = type(config).__module__.startswith("transformers_modules")  # was trusted when the configuration was read
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=own_code, **options)
    assert isinstance(model, PreTrainedModel)
    return model.eval()  # type: ignore[no-any-return]


def deals_out_keys(config: PreTrainedConfig) -> bool:
    """Whether each tensor rank has keys and values of its own heads alone, by the model's plan; others gather them."""
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    return any(style == "colwise" and name.endswith((".k_proj", ".kv_b_proj")) for name, style in plan.items())


# ---- by a forward pass


def _traced_shape(config: PreTrainedConfig) -> ModelShape:
    calls = trace_attention()
    lm = model_on_meta(config, attn_implementation=TRACED_ATTENTION, experts_implementation=TRACED_EXPERTS)
    tokens = torch.arange(TRACED_TOKENS, device="meta")[None]
    for part in lm.modules():
        if isinstance(part, PreTrainedModel):
            vars(part)["warn_if_padding_and_no_attention_mask"] = _no_warning  # it would look at the tokens
    trace = _Trace(calls)
    _run_one_of_each_block(lm, trace)
    inputs = {"input_ids": tokens, "position_ids": tokens, "use_cache": False}
    with torch.no_grad(), trace.counter:
        lm.base_model(**inputs)
        body, attention = trace.flops, Counter(trace.attention)
        lm(**inputs)
        head = trace.flops - 2 * body  # body and head together, in which no block is run again
    return ModelShape(
        macs_per_token=body / 2 / TRACED_TOKENS - _repeated_macs(lm),
        macs_per_loss_token=head / 2 / TRACED_TOKENS,
        attention=tuple(
            AttentionShape(count, call.num_heads, call.num_kv_heads, call.key_dim, call.value_dim, call.window)
            for call, count in attention.items()
        ),
    )


def _repeated_macs(lm: PreTrainedModel) -> float:
    """MACs per token that Mamba 2 does not have: its kernels multiply C with B once per group of heads within a chunk.

    (arXiv:2405.21060, section 6.) The code of transformers, which was traced, repeats both for every head.
    """
    macs = 0
    for layer in state_layers(lm).values():
        sizes = vars(layer)
        if sizes.keys() >= set(STATE_SPACE_SIZES):
            heads, groups, state, chunk = (int(sizes[name]) for name in STATE_SPACE_SIZES)
            macs += (heads - groups) * state * min(chunk, TRACED_TOKENS)
    return float(macs)


def _no_warning(*_: object) -> None:
    """Tokens on the meta device have no values to look at."""


def _bmm_flops(a: torch.Size, b: torch.Size, out_shape: torch.Size | None = None, **_: Any) -> int:
    """FLOPs of a batched product; outer products (positions and rotary frequencies) are no work of the model."""
    batch, rows, inner = a
    return 0 if inner == 1 else 2 * batch * rows * inner * b[-1]


@dataclass(frozen=True, eq=False)
class _Block:
    """A transformer block that was run: its output, FLOPs and attention calls."""

    output: Any
    flops: int
    attention: list[AttentionCall]


@dataclass(eq=False)
class _Trace:
    """What a forward pass has done so far.

    Args:
        calls: every call of the attention that was run.
        counter: FLOPs of every operator that was run.
        blocks: first block of each kind, by its signature.
        repeated: blocks that were not run again.
        is_inside: whether a block is running; blocks inside of it are part of it.
    """

    calls: list[AttentionCall]
    counter: FlopCounterMode = field(
        default_factory=lambda: FlopCounterMode(display=False, custom_mapping={torch.ops.aten.bmm: _bmm_flops})
    )
    blocks: dict[object, _Block] = field(default_factory=dict)
    repeated: list[_Block] = field(default_factory=list)
    is_inside: bool = False

    @property
    def flops(self) -> int:
        """FLOPs of the pass, repeated blocks included."""
        return self.counter.get_total_flops() + sum(block.flops for block in self.repeated)

    @property
    def attention(self) -> list[AttentionCall]:
        """Attention calls of the pass, those of repeated blocks included."""
        return self.calls + [call for block in self.repeated for call in block.attention]

    def run(self, signature: object, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block, or return the output of an equal one."""
        if self.is_inside:
            return forward(*args, **kwargs)
        if signature not in self.blocks:
            flops, num_calls = self.counter.get_total_flops(), len(self.calls)
            self.is_inside = True
            output = forward(*args, **kwargs)
            self.is_inside = False
            flops = self.counter.get_total_flops() - flops
            self.blocks[signature] = _Block(output, flops, self.calls[num_calls:])
        else:
            self.repeated.append(self.blocks[signature])
        return self.blocks[signature].output


def _run_one_of_each_block(lm: PreTrainedModel, trace: _Trace) -> None:
    """Replace the blocks' ``forward``, so that a pass of ``lm`` runs a single block of each kind."""
    names = set(lm._no_split_modules or ())
    kinds = getattr(lm.config.get_text_config(), "layer_types", None)
    for block in lm.modules():
        if type(block).__name__ in names:
            block.forward = partial(trace.run, block_signature(block, kinds), block.forward)


def block_signature(block: nn.Module, kinds: list[str] | None) -> object:
    """Equal for blocks that do the same: modules, shapes of parameters, switches and sizes, kind of layer."""
    parts: list[object] = []
    for name, module in block.named_modules():
        shapes = tuple((key, None if p is None else tuple(p.shape)) for key, p in module._parameters.items())
        values = tuple((key, value) for key, value in vars(module).items() if _is_setting(value) and not _is_index(key))
        layer = getattr(module, "layer_idx", None)
        parts.append((name, type(module), shapes, values, kinds[layer] if kinds and isinstance(layer, int) else None))
    return tuple(parts)


def _is_setting(value: object) -> bool:
    return value is None or isinstance(value, bool | int | str)


def _is_index(name: str) -> bool:
    return "idx" in name or "layer_id" in name or "layer_number" in name


# ---- from the sizes of the parameters


def _estimated_shape(config: PreTrainedConfig) -> ModelShape:
    """Count every matrix once per token, experts by the number of active ones; read attention off the usual settings.

    This misses layers that run several times in a pass, and heads of several sizes.
    """
    lm = model_on_meta(config)
    text = lm.config.get_text_config()
    heads = int(text.num_attention_heads)
    width = int(_first(text, ("head_dim",)) or text.hidden_size // heads)
    attention = AttentionShape(
        num_layers=int(text.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(_first(text, ("num_key_value_heads",)) or heads),
        key_dim=int(_first(text, ("qk_head_dim",)) or width),
        value_dim=int(_first(text, ("v_head_dim",)) or width),
    )
    active = _active_experts(text)
    return ModelShape(
        macs_per_token=sum(
            _macs_of(parameter, active)
            for module in lm.get_decoder().modules()
            if not isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        ),
        macs_per_loss_token=sum(_macs_of(parameter, None) for parameter in lm.get_output_embeddings().parameters()),
        attention=(attention,),
    )


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> Any:
    """The first of these settings that the family has and sets."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _active_experts(config: PreTrainedConfig) -> float | None:
    """Experts of a token that compute something; some families have experts that do not (arXiv:2509.01322)."""
    active, identities = _first(config, ACTIVE_EXPERTS), _first(config, ("zero_expert_num",))
    if active is None or identities is None:
        return None if active is None else float(active)
    return float(active * config.n_routed_experts / (config.n_routed_experts + identities))


def _macs_of(parameter: nn.Parameter, active: float | None) -> float:
    """[in, out] counts all of its weights, [experts, in, out] those of the active experts."""
    if parameter.ndim < 2:
        return 0.0
    if parameter.ndim == 3 and active is not None:
        return parameter.numel() / parameter.shape[0] * active
    return float(parameter.numel())
