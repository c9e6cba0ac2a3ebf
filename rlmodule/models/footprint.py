"""Bytes that a training step keeps for its backward pass, from passes without weights and without arithmetic.

A pass runs the model's own code on fake tensors, which have shapes and no memory, and counts what is alive: so gated
MLPs, autocast and recomputed blocks need no rule of their own. Attention stands for a fused kernel, which keeps
queries, keys, values, outputs and one number per token and head; families with sinks or capped products run theirs. Of
experts, every token's rows go through one. Adapters are left out: they keep ``r`` numbers per token and adapted matrix.

All blocks are counted, also where stages of a pipeline share them: the first of p stages has a p-th of the blocks, and
p micro-batches in flight (arXiv:2104.04473), so about as much as one process with all blocks and one micro-batch. Later
stages have fewer in flight, and keep less.

Leaves out weights, gradients, moments and the language-model head (``run/planning/memory.py``).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rlmodule.models.fp32 import compute_in_fp32
from rlmodule.models.policy import hidden_states, silence_dropout
from rlmodule.models.recompute import recompute_activations
from rlmodule.models.shape import block_signature
from rlmodule.ops.attention import packed_attention
from rlmodule.ops.segments import SegmentBuckets

LENGTHS = (128, 256)  # tokens of the traced passes: two points of a line
LONGER = 384  # and a third for families whose attention grows with the square
PLANNED = "rlmodule_planned"  # stand-ins for attention and experts
# Sizes that tensor-parallel ranks share.
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
CAPS = ("attn_logit_softcapping",)  # settings of families whose attention products are capped
WITH_SINKS = ("gpt_oss",)  # families whose attention has sinks


@dataclass(frozen=True)
class Footprint:
    """Bytes of activations; ``T`` tokens in samples of ``L`` tokens at most.

    Args:
        fixed: whatever the number of tokens: weights that autocast has cast to bfloat16, above all.
        per_token: of each token.
        per_pair: of each pair of tokens of a sample, for families without a fused attention; else 0.
        backward_fixed, backward_per_token, backward_per_pair: what the backward pass of a block holds on top of that,
            among it what recomputed blocks made again.
    """

    fixed: float
    per_token: float
    per_pair: float
    backward_fixed: float
    backward_per_token: float
    backward_per_pair: float

    def kept(self, num_tokens: int, longest: int) -> float:
        """Bytes alive when the backward pass begins."""
        return self.fixed + num_tokens * (self.per_token + self.per_pair * longest)

    def backward(self, num_tokens: int, longest: int) -> float:
        """Bytes that the backward pass holds on top of them at its most expensive moment."""
        return self.backward_fixed + num_tokens * (self.backward_per_token + self.backward_per_pair * longest)


_known: dict[tuple[object, ...], Footprint] = {}


def footprint_of(config: PreTrainedConfig, *, compute_dtype: torch.dtype | None, checkpointing: str) -> Footprint:
    """Trace a model all of whose weights train; takes about a second, whatever its size.

    Args:
        config: of the causal LM.
        compute_dtype: of autocast; None for none.
        checkpointing: none, full or selective.
    """
    key = config.to_json_string(use_diff=False), compute_dtype, checkpointing
    if key not in _known:
        _known[key] = _trace(config, compute_dtype, checkpointing)
    return _known[key]


def tensor_rank_config(config: PreTrainedConfig, tp_size: int) -> PreTrainedConfig:
    """The text model as one of ``tp_size`` tensor-parallel ranks computes it: its share of heads and of the MLP."""
    text = copy.deepcopy(config.get_text_config())
    if tp_size == 1:
        return text
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in SPLIT:
        size = getattr(text, name, None)
        if isinstance(size, int):
            setattr(text, name, max(1, size // tp_size))
    return text


def _trace(config: PreTrainedConfig, compute_dtype: torch.dtype | None, checkpointing: str) -> Footprint:
    AttentionInterface.register(PLANNED, _planned_attention)
    ALL_EXPERTS_FUNCTIONS.register(PLANNED, _planned_experts)
    rows = {length: _segment(length) for length in (*LENGTHS, LONGER)}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
        lm = _fake_model(config.get_text_config(), checkpointing)
        kinds = _Kinds(lm)
        grows = any(getattr(config.get_text_config(), name, None) for name in CAPS) or config.model_type in WITH_SINKS
        points = {n: _all_blocks(lm, kinds, rows[n], compute_dtype) for n in (*LENGTHS, *((LONGER,) if grows else ()))}
    kept, backward = (_fit({n: float(bytes_[i]) for n, bytes_ in points.items()}) for i in (0, 1))
    return Footprint(*kept, *backward)


def _fake_model(config: PreTrainedConfig, checkpointing: str) -> PreTrainedModel:
    """A model in train mode whose weights' gradients are dropped at once: they are counted elsewhere."""
    stand_ins = {"attn_implementation": PLANNED, "experts_implementation": PLANNED, "dtype": torch.float32}
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), **stand_ins)
    compute_in_fp32(lm)
    silence_dropout(lm)
    recompute_activations(lm.train(), checkpointing)
    embedding = lm.get_input_embeddings()
    embedding.requires_grad_(False)  # its gradient comes when everything else is gone
    embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    return lm


def _fit(points: Mapping[int, float]) -> tuple[float, float, float]:
    """(constant, slope, curvature) through two or three points."""
    (a, x), (b, y), *rest = points.items()
    slope, curvature = (y - x) / (b - a), 0.0
    for c, z in rest:
        curvature = ((z - y) / (c - b) - slope) / (c - a)
        slope = slope - curvature * (a + b)
    return x - slope * a - curvature * a * a, slope, curvature


class _Kinds:
    """The blocks of a model by kind; as many of each as ``run`` says are run, the rest hand on their input."""

    def __init__(self, lm: PreTrainedModel) -> None:
        names, kinds = set(lm._no_split_modules or ()), getattr(lm.config.get_text_config(), "layer_types", None)
        self.blocks: dict[object, list[Any]] = {}
        for block in lm.modules():
            if type(block).__name__ in names:
                self.blocks.setdefault(block_signature(block, kinds), []).append(block)
        self.in_tuple = False
        for blocks in self.blocks.values():
            for block in blocks:
                block.forward = partial(self._forward, block, block.forward)
        self.run(dict.fromkeys(self.blocks, 1))

    def run(self, counts: Mapping[object, int]) -> None:
        """Run the first ``counts[kind]`` blocks of each kind."""
        self._running = {id(block) for kind, blocks in self.blocks.items() for block in blocks[: counts[kind]]}

    def _forward(self, block: nn.Module, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if id(block) in self._running:
            out = forward(hidden, *args, **kwargs)
            self.in_tuple = isinstance(out, tuple)
            return out
        return (hidden,) if self.in_tuple else hidden


def _all_blocks(
    lm: PreTrainedModel, kinds: _Kinds, row: SegmentBuckets, compute_dtype: torch.dtype | None
) -> tuple[float, float]:
    """(bytes that all blocks keep, bytes on top of them in the backward pass of one), from passes of few of them."""
    once = dict.fromkeys(kinds.blocks, 1)
    kinds.run(once)
    kept, backward = _pass(lm, row, compute_dtype)
    total = kept
    for kind, blocks in kinds.blocks.items():
        if len(blocks) > 1:
            kinds.run({**once, kind: 2})
            total += (len(blocks) - 1) * (_pass(lm, row, compute_dtype)[0] - kept)
    return total, backward


def _segment(length: int) -> SegmentBuckets:
    """One sample of ``length`` tokens, its layouts made while tensors are real."""
    made = SegmentBuckets.from_cu_seqlens(torch.tensor([0, length]))
    _ = made.side_by_side, made.longest
    return made


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _pass(lm: PreTrainedModel, segments: SegmentBuckets, compute_dtype: torch.dtype | None) -> tuple[int, int]:
    """(bytes alive after the forward pass, most bytes alive in the backward pass on top of those)."""
    tokens = torch.zeros(1, segments.num_tokens, dtype=torch.int64)
    autocast = nullcontext() if compute_dtype is None else torch.autocast("cpu", dtype=compute_dtype)
    with LiveBytes() as memory:
        with autocast:
            hidden = hidden_states(lm, tokens, tokens, segments=segments)
        kept, memory.peak = memory.live, memory.live
        hidden.backward(torch.empty_like(hidden))
    return kept, memory.peak - kept


class LiveBytes(TorchDispatchMode):
    """Live and peak bytes of the storages that operations made inside; views make none. Fake tensors count as real."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        makes_views = any(result.alias_info is not None for result in func._schema.returns)  # type: ignore[attr-defined]
        for tensor in [] if makes_views else tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._made(tensor.untyped_storage())
        return out

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.live -= size
        self._known.discard(key)


class _FusedAttention(torch.autograd.Function):
    """What a fused kernel allocates, and nothing of what it computes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # [T, heads, D] each, gathered by segment; out is [1, T, heads, Dv].
        kept = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
        out = kept[0].new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        normaliser = out.new_empty(query.shape[1], query.shape[2], dtype=torch.float32)
        ctx.save_for_backward(*kept, out, normaliser)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.empty_like(x).transpose(0, 1).unsqueeze(0) for x in ctx.saved_tensors[:3])


def _planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    segments: SegmentBuckets | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature, as in ``attention.py``."""
    assert segments is not None
    if softcap is None and s_aux is None:
        return _FusedAttention.apply(query, key, value), None  # type: ignore[no-untyped-call]
    return packed_attention(query, key, value, segments, 1.0, softcap=softcap, sinks=s_aux), None


def _planned_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts signature: every token's rows through one expert, whatever the router says."""
    num_chosen = top_k_index.shape[-1]
    rows = hidden.repeat_interleave(num_chosen, 0)
    up, down = (experts.gate_up_proj if experts.has_gate else experts.up_proj)[0], experts.down_proj[0]
    inner = rows @ (up if experts.is_transposed else up.t())
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = inner @ (down if experts.is_transposed else down.t())
    weighted = out * top_k_weights.reshape(-1, 1)
    summed: Tensor = weighted.view(-1, num_chosen, hidden.shape[-1]).sum(1)
    return summed.to(hidden.dtype)
