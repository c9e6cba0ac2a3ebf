"""Which Hugging Face tensors each parameter of a ``MegatronTrunk`` is made of, and which models can be one.

Megatron fuses queries, keys and values head group by head group, and gate and up projection one after the other; local
layers and those of Transformer Engine keep their norms in different places. Leaves out the numbers (``pieces.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import check_stages
from strategies.parts.megatron_trunk import MegatronTrunk, head_dim_of, num_experts_of
from strategies.parts.pieces import Piece, Pieces, unchanged
from strategies.parts.stages import first_blocks

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")

View = Callable[[Tensor], Tensor]
Entry = tuple[str, int | None, View]  # what follows the layer's name, dimension that ranks cut, view

SUMMED = ("self_attention.q_layernorm", "self_attention.k_layernorm")  # each rank has the share of its own heads
SUMMED_OVER_POSITIONS = ("norm", "mlp.router")  # with sequence parallelism each rank has the share of its positions


def _heads(hf: Any, start: int, stop: int) -> View:
    """Rows of the fused projection that belong to heads ``start`` to ``stop`` of each group of queries, key, value."""
    each, width = hf.num_attention_heads // hf.num_key_value_heads + 2, head_dim_of(hf)
    return lambda fused: fused.view(-1, each, width, *fused.shape[1:])[:, start:stop]


def _half(number: int) -> View:
    return lambda fused: fused.chunk(2, 0)[number]


def _entries(hf: Any) -> dict[str, list[Entry]]:
    """Megatron's name of a module in a layer, or of a parameter without one -> its pieces."""
    queries = hf.num_attention_heads // hf.num_key_value_heads
    return {
        "input_layernorm.weight": [("input_layernorm.weight", None, unchanged)],
        "self_attention.linear_qkv.layer_norm_weight": [("input_layernorm.weight", None, unchanged)],
        "pre_mlp_layernorm.weight": [("post_attention_layernorm.weight", None, unchanged)],
        "mlp.linear_fc1.layer_norm_weight": [("post_attention_layernorm.weight", None, unchanged)],
        "self_attention.q_layernorm.weight": [("self_attn.q_norm.weight", None, unchanged)],
        "self_attention.k_layernorm.weight": [("self_attn.k_norm.weight", None, unchanged)],
        "self_attention.linear_proj.weight": [("self_attn.o_proj.weight", 1, unchanged)],
        **{
            f"self_attention.linear_qkv.{kind}": [
                (f"self_attn.q_proj.{kind}", 0, _heads(hf, 0, queries)),
                (f"self_attn.k_proj.{kind}", 0, _heads(hf, queries, queries + 1)),
                (f"self_attn.v_proj.{kind}", 0, _heads(hf, queries + 1, queries + 2)),
            ]
            for kind in ("weight", "bias")
        },
        "mlp.linear_fc1.weight": [
            ("mlp.gate_proj.weight", 0, _half(0)),
            ("mlp.up_proj.weight", 0, _half(1)),
        ],
        "mlp.linear_fc2.weight": [("mlp.down_proj.weight", 1, unchanged)],
        "mlp.router.weight": [("mlp.gate.weight", None, unchanged)],
        "mlp.experts.gate_up_proj": [("mlp.experts.gate_up_proj", 0, unchanged)],
        "mlp.experts.down_proj": [("mlp.experts.down_proj", 0, unchanged)],
    }


def pieces_of_trunk(trunk: MegatronTrunk) -> Iterator[Pieces]:
    """Every parameter of this stage with its pieces, by the names of the transformers model; a shared one once."""
    entries = _entries(trunk.config)
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    outside = {
        "embedding.weight": Piece((table, head) if trunk.is_tied else (table,), 0),
        "output_weight": Piece((table, head) if trunk.is_tied else (head,), 0),
        "norm.weight": Piece(("model.norm.weight",)),
        "score.weight": Piece(("score.weight",)),
        "score.bias": Piece(("score.bias",)),
    }
    for name, parameter in trunk.named_parameters():
        if name in outside:
            yield parameter, (outside[name],)
            continue
        _, place, rest = name.split(".", 2)
        layer = f"model.layers.{trunk.plan.layers[int(place)]}"
        yield parameter, tuple(Piece((f"{layer}.{piece}",), dim, view) for piece, dim, view in entries[rest])


def layers_of_stage(num_layers: int, stage: int, pp_size: int) -> range:
    """Numbers of the layers of one stage."""
    bounds = first_blocks(num_layers, pp_size)
    return range(bounds[stage], bounds[stage + 1])


def stage_of(name: str, num_layers: int, pp_size: int) -> int:
    """The first stage that holds the transformers model's parameter of that name, or one beside that model."""
    if name.startswith("model.layers."):
        layer = int(name.split(".")[2])
        return next(s for s in range(pp_size) if layer in layers_of_stage(num_layers, s, pp_size))
    return 0 if name.startswith("model.embed_tokens.") else pp_size - 1


def shares_of_ranks(trunk: MegatronTrunk) -> list[nn.Parameter]:
    """Parameters that every tensor rank has whole, and of whose gradient it has only its share."""
    parts = SUMMED + (SUMMED_OVER_POSITIONS if trunk.plan.sequence_parallel else ())
    cut = {parameter for parameter, pieces in pieces_of_trunk(trunk) if any(piece.dim is not None for piece in pieces)}
    return [
        parameter
        for name, parameter in trunk.named_parameters()
        if parameter not in cut and any(part in name for part in parts)
    ]


@dataclass(frozen=True)
class Degrees:
    """What a model is to be cut by."""

    tp_size: int
    pp_size: int
    sequence_parallel: bool


def check_model(hf: Any, degrees: Degrees, *, has_adapters: bool) -> None:
    """Refuse a model that cannot be built from Megatron's layers, or not with these degrees.

    Args:
        hf: its configuration.
        degrees: what it is cut by.
        has_adapters: whether it trains adapters (LoRA).

    Raises:
        ConfigError: names the key and what works.
    """
    reason = _what_is_missing(hf, has_adapters=has_adapters)
    if reason is not None:
        raise ConfigError(
            key="strategy",
            got="megatron",
            because=reason,
            fix=f"Use strategy=fsdp2, which trains any model; megatron trains {', '.join(FAMILIES)} without adapters",
        )
    experts = num_experts_of(hf)
    sizes = {
        "num_attention_heads": hf.num_attention_heads,
        "num_key_value_heads": hf.num_key_value_heads,
        "vocab_size": hf.vocab_size,
        **({"intermediate_size": hf.intermediate_size} if experts is None else {"num_experts": experts}),
    }
    for label, size in sizes.items():
        if size % degrees.tp_size:
            raise ConfigError(
                key="strategy.tp_size",
                got=degrees.tp_size,
                because=f"it does not divide {label}={size}",
                fix="Use a divisor, or strategy.tp_size=1",
            )
    check_stages(hf.num_hidden_layers, degrees.pp_size)
    if experts is not None and degrees.tp_size > 1 and not degrees.sequence_parallel:
        raise ConfigError(
            key="strategy.sequence_parallel",
            got=False,
            because="Megatron-core trains experts over tensor ranks only if those share the positions of a row",
            fix="Use strategy.sequence_parallel=true",
        )


def _what_is_missing(hf: Any, *, has_adapters: bool) -> str | None:
    """Why this model cannot be built, None where it can."""
    if hf.model_type not in FAMILIES:
        return f"it has no layers of {hf.model_type}"
    if has_adapters:
        return "adapters (model.lora) cannot be put on Megatron's fused matrices"
    for key in ("attention_bias", "mlp_bias"):
        if getattr(hf, key, False):
            return f"the model has {key}=true, and biases are built for the queries, keys and values of qwen2 alone"
    if getattr(hf, "hidden_act", "silu") != "silu":
        return f"the model has hidden_act={hf.hidden_act}, and only silu is built"
    kind = (getattr(hf, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return f"the model has rope_type={kind}, whose angles change with the length of a row, and fixed ones are built"
    if getattr(hf, "mlp_only_layers", None) or getattr(hf, "decoder_sparse_step", 1) not in (1, None):
        return "the model mixes layers with and without experts"
    return None
