"""torchtitan's transformer blocks in the places of those of a transformers model, under the names of the latter.

Its attention, feed-forward layers and norms compute, split over tensor ranks as its sharding configurations say.
Embedding, rotary angles, final norm and heads stay those of the transformers model, and so do the parameters
themselves: a block takes them over before they are read from disk, split or sharded. Its packages are imported when
this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common import CosSinRoPE, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.sharding import _set_llama3_layer_sharding
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import _set_qwen3_layer_sharding
from torchtitan.protocols.module import Module
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@dataclass(frozen=True)
class Family:
    """How torchtitan builds the blocks of one kind of model.

    Args:
        block: class of a block.
        set_sharding: writes into a block's configuration how its matrices are split; called with ``enable_sp``.
        normalises_heads: whether queries and keys have norms of their own.
    """

    block: Any
    set_sharding: Callable[..., None]
    normalises_heads: bool


def _set_qwen3_sharding(config: Any, *, enable_sp: bool) -> None:
    _set_qwen3_layer_sharding(config, enable_sp=enable_sp, enable_ep=False)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(Llama3TransformerBlock, _set_llama3_layer_sharding, normalises_heads=False),
    "qwen3": Family(Qwen3TransformerBlock, _set_qwen3_sharding, normalises_heads=True),
}

# Place in a transformers block -> place in torchtitan's.
PLACES: Mapping[str, str] = {
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass(frozen=True, eq=False)
class BlockCall:
    """What travels through torchtitan's layers as ``positions`` and as ``attention_masks``.

    Args:
        rotary: cosines and sines, [1, T, D] each, as the transformers model makes them.
        options: keywords of the attention: where samples begin and end, sequence ranks.
    """

    rotary: tuple[Tensor, Tensor]
    options: Mapping[str, Any]


class RotaryOfModel(Module):  # type: ignore[misc]
    """Rotates by the angles that come with the call: every way to scale them is the transformers model's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Nothing to configure."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, positions: BlockCall) -> tuple[Tensor, Tensor]:
        """[1, T, heads, D] each."""
        angles = torch.cat(positions.rotary, dim=-1)[:, :, None]  # [1, T, 1, 2 D]
        if isinstance(query, DTensor):
            whole = [Replicate()] * query.device_mesh.ndim
            angles = DTensor.from_local(angles, query.device_mesh, whole, run_check=False)
        return CosSinRoPE.apply_rotary_emb(query, key, angles)  # type: ignore[no-any-return]


class AttentionOfModel(Module):  # type: ignore[misc]
    """The attention that the transformers model was built with, on the heads that this process has."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """``implementation`` is a name that transformers knows an attention by."""

        implementation: str

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.implementation = config.implementation

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803  names that torchtitan's sharding configurations use
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: BlockCall,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, T, heads, D] each."""
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        attention = ALL_ATTENTION_FUNCTIONS[self.implementation]
        options = {"scaling": scale, "sliding_window": None, **attention_masks.options}
        out, _weights = attention(self, query, key, value, None, **options)
        return out  # type: ignore[no-any-return]


class TorchTitanBlock(GradientCheckpointingLayer):
    """A torchtitan block that is called as the transformers block whose parameters it took over.

    The modules that hold parameters stand at the transformers block's places; torchtitan's own tree, which calls them,
    is no submodule.

    Args:
        block: of transformers; peft's adapters around its matrices stay where they are.
        config: of torchtitan's block.
        tensor: ranks that matrices are split over, None for one.
    """

    def __init__(self, block: nn.Module, config: Any, tensor: ParallelDims | None) -> None:
        super().__init__()
        self.gradient_checkpointing = bool(block.gradient_checkpointing)
        self._gradient_checkpointing_func = getattr(block, "_gradient_checkpointing_func", None)
        with torch.device("meta"):
            titan = config.build()
        there = dict(block.named_modules())
        for place, titan_place in PLACES.items():
            if place in there:
                self._take_over(there[place], place, titan, titan_place)
        if tensor is not None:
            titan.parallelize(tensor)
        self.mesh = None if tensor is None else tensor.resolve_mesh(["tp"])
        self.titan = (titan,)
        self.train(block.training)

    def _take_over(self, old: nn.Module, place: str, titan: nn.Module, titan_place: str) -> None:
        made = titan.get_submodule(titan_place)
        base = getattr(old, "base_layer", old)
        made._parameters.update(base._parameters)
        if base is not old:  # an adapter is around it
            old.base_layer = made
            made = old
            owner, _, leaf = titan_place.rpartition(".")
            setattr(titan.get_submodule(owner), leaf, old)
        owner, _, leaf = place.rpartition(".")
        if owner and owner not in dict(self.named_children()):
            self.add_module(owner, nn.Module())
        self.get_submodule(owner).add_module(leaf, made)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        assert attention_mask is None, "the project's attention takes no mask"
        assert position_embeddings is not None, "a model with rotary angles hands them to its blocks"
        call = BlockCall(position_embeddings, options)
        if self.mesh is None:
            return self.titan[0](hidden_states, call, call)  # type: ignore[no-any-return]
        hidden = DTensor.from_local(hidden_states, self.mesh, [Replicate()], run_check=False)
        # fully_shard hangs its hook on what a block returns, which may be no view.
        return self.titan[0](hidden, call, call).to_local().clone()  # type: ignore[no-any-return]


class TensorRanks(ParallelDims):  # type: ignore[misc]
    """torchtitan's parallel dimensions over our own mesh: it splits matrices, and all else is fsdp2's affair."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.spmd_backend = "partial_dtensor"
        self._mesh = mesh._flatten("tp")  # its name for them

    def resolve_mesh(self, axes: Any) -> DeviceMesh | None:
        """The tensor ranks, where an axis of that name is asked for."""
        return self._mesh if "tp" in [str(axis) for axis in axes] else None


def put_blocks(lm: Any, tensor: DeviceMesh | None) -> None:
    """Replace the blocks of ``lm``, a model of ``FAMILIES``; afterwards they are what it names as its blocks."""
    hf, family = lm.config, FAMILIES[lm.config.model_type]
    ranks = None if tensor is None else TensorRanks(tensor)
    layers = lm.base_model.layers
    for index, block in enumerate(layers):
        layers[index] = TorchTitanBlock(block, _config(hf, family), ranks)
    lm._no_split_modules = [TorchTitanBlock.__name__]


def _config(hf: Any, family: Family) -> Any:
    """A block of the sizes that ``hf`` says."""
    unset: dict[str, Any] = {"weight": None, "bias": None}  # parameters are taken over, never made
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads

    def norm(width: int) -> Any:
        return RMSNorm.Config(normalized_shape=width, eps=hf.rms_norm_eps, param_init=unset)

    attention = make_gqa_config(
        dim=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        wqkv_param_init=unset,
        wo_param_init=unset,
        inner_attention=AttentionOfModel.Config(implementation=hf._attn_implementation),
        qk_norm=norm(head_dim) if family.normalises_heads else None,
        rope=RotaryOfModel.Config(),
    )
    feed_forward = make_ffn_config(
        dim=hf.hidden_size, hidden_dim=hf.intermediate_size, w1_param_init=unset, w2w3_param_init=unset
    )
    config = family.block.Config(
        attention=attention,
        feed_forward=feed_forward,
        attention_norm=norm(hf.hidden_size),
        ffn_norm=norm(hf.hidden_size),
    )
    family.set_sharding(config, enable_sp=False)
    return config
