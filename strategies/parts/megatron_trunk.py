"""A transformers model rebuilt from Megatron-core's layers: what a policy or value model has at ``lm`` under megatron.

It answers what those models ask of ``lm``: hidden states of a packed row, the head, the configuration. The attention is
the one the transformers model was given, so packed rows, shared prompts and Ulysses need nothing of Megatron's own
packing. Layers of a pipeline stage are made by number; Megatron-core itself is told of no stages.

Leaves out names (``megatron_names.py``), gradients over ranks (``strategies/megatron.py``) and sampling, which runs the
transformers model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from rlmodule.core.contract import SequenceRanks
from strategies.parts.megatron_api import (
    ModuleSpec,
    TransformerConfig,
    VocabParallelEmbedding,
    build_module,
    gather_from_sequence_parallel_region,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    on_device,
)


@dataclass(frozen=True)
class TrunkPlan:
    """How a model is built.

    Args:
        tp_size, tp_rank: ranks that share every matrix, and this one's place.
        layers: numbers of the layers of this stage, counted from 0.
        is_first, is_last: whether this stage has the embedding; the last norm and the head.
        sequence_parallel: whether tensor ranks share the positions of a row between their matrices.
        transformer_engine: whether layers are Transformer Engine's, which needs CUDA.
        device: of the parameters.
    """

    tp_size: int
    tp_rank: int
    layers: range
    is_first: bool
    is_last: bool
    sequence_parallel: bool
    transformer_engine: bool
    device: torch.device


@dataclass(frozen=True, eq=False)
class Packed:
    """Goes through Megatron's layers as its packed-sequence parameters, in a format that only our attention reads."""

    segments: Any  # rlmodule.ops.segments.SegmentBuckets
    sequence: SequenceRanks | None
    qkv_format: str = "rows"


class RMSNorm(nn.Module):
    """Megatron's keywords around torch's norm; its own wrapper refuses rows whose positions are shared out."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RowAttention(nn.Module):
    """Megatron's core attention over one packed row, computed by the attention of the transformers model."""

    def __init__(self, *, layer_number: int, model_config: Any, scaling: float, **_: Any) -> None:
        super().__init__()
        self.config, self.layer_idx, self.scaling = model_config, layer_number - 1, scaling
        self.is_causal = True
        self.attend = AttentionInterface()[model_config._attn_implementation]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Packed, **_: Any
    ) -> Tensor:
        """[T, 1, heads, D] queries, [T, 1, kv heads, D] keys and values -> [T, 1, heads * D]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out, _weights = self.attend(
            self,
            q,
            k,
            v,
            None,
            scaling=self.scaling,
            segments=packed_seq_params.segments,
            sequence=packed_seq_params.sequence,
        )
        return out.transpose(0, 1).flatten(2)  # type: ignore[no-any-return]


class Router(nn.Module):
    """Chooses experts as transformers does; Megatron's own cannot do without Transformer Engine."""

    def __init__(self, config: Any, *, normalised: bool, **_: Any) -> None:
        super().__init__()
        self.num_chosen, self.normalised = config.moe_router_topk, normalised
        self.weight = nn.Parameter(torch.empty(config.num_moe_experts, config.hidden_size))

    def set_layer_number(self, layer_number: int) -> None:
        """Nothing here depends on it."""

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """[T, 1, H] states -> [T, E] weights, 0 for experts that were not chosen; [T, E] which were."""
        probability = functional.linear(hidden.flatten(0, 1), self.weight).softmax(-1, dtype=torch.float32)
        chosen, place = probability.topk(self.num_chosen, -1)
        if self.normalised:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        weights = torch.zeros_like(probability).scatter(-1, place, chosen)
        return weights, torch.zeros_like(probability, dtype=torch.bool).scatter(-1, place, True)


class Experts(nn.Module):
    """This rank's experts in two tensors, as transformers has them: [E', 2 I, H] and [E', H, I] of E experts."""

    def __init__(self, num_local_experts: int, config: Any, **_: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_ffn_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_local_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, width, inner))

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probability: Tensor) -> tuple[Tensor, None]:
        """[N, H] states in the order of their experts, [E'] how many each has, [N] weights -> [N, H]."""
        parts = []
        for number, part in enumerate(hidden.split(tokens_per_expert.tolist())):
            gate, up = functional.linear(part, self.gate_up_proj[number]).chunk(2, -1)
            parts.append(functional.linear(functional.silu(gate) * up, self.down_proj[number]))
        return torch.cat(parts) * probability.reshape(-1, 1).to(hidden.dtype), None


@dataclass(frozen=True)
class _Head:
    """What a policy asks of the head: this rank's rows."""

    weight: Tensor
    bias: None = None


@dataclass(frozen=True)
class _Hidden:
    """What a model returns."""

    last_hidden_state: Tensor


class MegatronTrunk(nn.Module):
    """This process's part of a transformers causal LM or token classifier.

    Args:
        lm: the transformers model, which gives configuration, rotary frequencies and a value head.
        plan: how it is built.
        whole: the transformers model without weights, which writes folders of whole weights.

    Attributes:
        layer_config: Megatron's configuration of the layers.
        arrived: [1, T, H] (T/tp with sequence parallelism) hidden states from the stage before, set for each call.
    """

    def __init__(self, lm: Any, plan: TrunkPlan, whole: Any) -> None:
        super().__init__()
        self._whole = (whole,)  # not a part of this module
        hf = lm.config
        self.config, self.plan = hf, plan
        self._keep_in_fp32_modules, self._keep_in_fp32_modules_strict = (
            lm._keep_in_fp32_modules,
            lm._keep_in_fp32_modules_strict,
        )
        self.is_tied = lm.get_output_embeddings() is not None and bool(hf.tie_word_embeddings)
        self.has_head = lm.get_output_embeddings() is not None
        self.inv_freq: Tensor = lm.model.rotary_emb.inv_freq.detach().to(plan.device, torch.float32)
        self.recompute = _recompute_of(lm)
        self.padding_idx: int | None = lm.model.embed_tokens.padding_idx
        self.arrived: Tensor | None = None
        made = self.layer_config = transformer_config(hf, plan)
        spec = layer_spec(hf, plan, lm.model.rotary_emb.attention_scaling)
        with on_device(plan.device):
            self.embedding = _embedding(hf, made, plan) if plan.is_first else None
            self.layers = nn.ModuleList(
                build_module(spec, config=made, layer_number=number + 1) for number in plan.layers
            )
        self.norm = RMSNorm(made, hf.hidden_size, hf.rms_norm_eps) if plan.is_last else None
        self.score = lm.score if plan.is_last and not self.has_head else None
        rows = hf.vocab_size // plan.tp_size
        is_shared_here = self.is_tied and plan.is_first
        self.output_weight = (
            nn.Parameter(torch.empty(rows, hf.hidden_size))
            if plan.is_last and self.has_head and not is_shared_here
            else None
        )
        self.to(plan.device)
        self.requires_grad_(next(lm.parameters()).requires_grad)
        shared: Any = self.output_weight
        if is_shared_here and self.embedding is not None:
            shared = self.embedding.weight
        self._head = None if shared is None or not plan.is_last else _Head(shared)

    # ---- what a policy or value model asks of its ``lm``

    @property
    def base_model(self) -> MegatronTrunk:
        """Itself."""
        return self

    def get_output_embeddings(self) -> _Head:
        """This rank's rows of the head."""
        assert self._head is not None, "only the last stage of a policy has a head"
        return self._head

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        """As of the transformers model."""
        self._whole[0].save_pretrained(folder, **options)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segments: Any,
        sequence: SequenceRanks | None = None,
        use_cache: bool = False,
    ) -> _Hidden:
        """[1, T] ids and positions -> [1, T, H] after the layers of this stage."""
        num_tokens = input_ids.shape[1]
        if self.plan.sequence_parallel:
            input_ids, position_ids, segments = _filled_up(input_ids, position_ids, segments, self.plan.tp_size)
        with on_device(self.plan.device):
            hidden = self._embedded(input_ids)
            angles = self._angles(position_ids[0])
            for layer in self.layers:
                hidden = self._layer(layer, hidden, angles, Packed(segments, sequence))
            if self.norm is not None:
                hidden = self.norm(hidden)
                if self.plan.sequence_parallel:
                    hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
                    hidden = hidden[:num_tokens]
        return _Hidden(hidden.transpose(0, 1))

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """[T, 1, H] embeddings (T/tp of them with sequence parallelism), or what has arrived."""
        if self.embedding is None:
            assert self.arrived is not None, "a later stage starts from the hidden states of the one before"
            return self.arrived.transpose(0, 1)
        hidden: Tensor = self.embedding(input_ids)
        rows = input_ids[0]
        if self.plan.sequence_parallel:
            rows = rows.chunk(self.plan.tp_size)[self.plan.tp_rank]
        else:
            hidden = hidden.transpose(0, 1).contiguous()
        if self.padding_idx is None:
            return hidden
        # transformers' embedding has no gradient for this token, wherever it stands in a row.
        return torch.where((rows == self.padding_idx)[:, None, None], hidden.detach(), hidden)

    def _angles(self, position: Tensor) -> Tensor:
        """[T] positions -> [T, 1, 1, D] rotary angles."""
        angles = position[:, None].float() * self.inv_freq
        return torch.cat((angles, angles), -1)[:, None, None]

    def _layer(self, layer: nn.Module, hidden: Tensor, angles: Tensor, packed: Packed) -> Tensor:
        def run(hidden: Tensor) -> Tensor:
            out, _ = layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed)
            return out  # type: ignore[no-any-return]

        return run(hidden) if self.recompute is None or not self.training else self.recompute(run, hidden)


def _recompute_of(lm: Any) -> Any:
    """How the transformers model was told to recompute its blocks, None where they keep their activations."""
    return getattr(lm.model.layers[0], "_gradient_checkpointing_func", None) if lm.is_gradient_checkpointing else None


def _embedding(hf: Any, config: Any, plan: TrunkPlan) -> nn.Module:
    made: nn.Module = VocabParallelEmbedding(
        hf.vocab_size,
        hf.hidden_size,
        init_method=config.embedding_init_method,
        reduce_scatter_embeddings=plan.sequence_parallel,
        config=config,
    )
    return made


def _filled_up(input_ids: Tensor, position_ids: Tensor, segments: Any, size: int) -> tuple[Tensor, Tensor, Any]:
    """A row whose length is a multiple of ``size``, by a segment of its own at the end."""
    missing = -input_ids.shape[1] % size
    if missing == 0:
        return input_ids, position_ids, segments
    filled = functional.pad(input_ids, (0, missing)), functional.pad(position_ids, (0, missing))
    return *filled, segments.padded(missing)


def num_experts_of(hf: Any) -> int | None:
    """Experts of a layer; None for a dense model."""
    return getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None)


def has_qk_norm(hf: Any) -> bool:
    """Whether queries and keys are normalised."""
    return str(hf.model_type).startswith("qwen3")


def layer_spec(hf: Any, plan: TrunkPlan, attention_scaling: float) -> Any:
    """Megatron's description of a layer, with our attention, norms and experts in it."""
    experts = num_experts_of(hf)
    if plan.transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, qk_layernorm=has_qk_norm(hf))
    else:
        spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=has_qk_norm(hf), normalization="RMSNorm")
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        if has_qk_norm(hf):
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    # Some kinds of rotary embedding scale cosine and sine, which scales the product of query and key twice.
    options = {"model_config": hf, "scaling": head_dim_of(hf) ** -0.5 * attention_scaling**2}
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=RowAttention, params=options)
    if experts is not None:
        spec.submodules.mlp.submodules.experts = Experts
        spec.submodules.mlp.submodules.router = partial(Router, normalised=getattr(hf, "norm_topk_prob", True))
    return spec


def head_dim_of(hf: Any) -> int:
    """Width of a head."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def transformer_config(hf: Any, plan: TrunkPlan) -> Any:
    """Megatron's configuration of the model: no dropout, no fusion that needs a kernel of its own, no pipeline."""
    experts = num_experts_of(hf)
    of_experts: dict[str, Any] = {}
    if experts is not None:
        of_experts = {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_pre_softmax": True,  # not read by our router; the other value refuses one expert per token
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": plan.tp_size,
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim_of(hf),
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=has_qk_norm(hf),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=plan.device.type != "cuda",
        perform_initialization=False,
        params_dtype=torch.float32,
        tensor_model_parallel_size=plan.tp_size,
        sequence_parallel=plan.sequence_parallel,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **of_experts,
    )
