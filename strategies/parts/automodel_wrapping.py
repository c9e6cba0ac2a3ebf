"""NeMo Automodel's parallelizer around a model of ours: its plans for tensor ranks, its FSDP2 units.

Embedding and head stay whole on tensor ranks, as our log-probabilities need the head. Its package is imported when this
module is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.distributed.mesh import MeshContext
from nemo_automodel.components.distributed.mesh_utils import ParallelismSizes, _create_fsdp2_device_mesh
from nemo_automodel.components.distributed.model_parallelizer import parallelize_model
from nemo_automodel.components.distributed.optimized_tp_plans import _parallelize_llama, _parallelize_qwen
from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from rlmodule.core.layout import Layout

# Its plans know causal LMs by their class; a value model of the same family has the same blocks. Norms of heads are
# marked in them: each tensor rank has its own heads' share of their gradients.
PLANS: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "llama": _parallelize_llama,
    "qwen2": _parallelize_qwen,
    "qwen3": _parallelize_qwen,
}
LEFT_WHOLE = ("embed_tokens", "lm_head")


def mesh_of(layout: Layout) -> DeviceMesh:
    """Its mesh over the running processes: (pipeline, replicas, shards, context, tensor); sequence ranks are shards."""
    sizes = ParallelismSizes(tp_size=layout.tp_size, dp_size=layout.dp_sp_size)
    mesh, _moe_mesh = _create_fsdp2_device_mesh(sizes, world_size=layout.world_size)
    return mesh  # type: ignore[no-any-return]


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, splits: bool, param_dtype: torch.dtype | None, reshard_after_forward: bool
) -> nn.Module:
    """Split matrices and shard units in place; parameters may be on the meta device.

    Args:
        model: of ours, with the transformers model at ``lm``.
        mesh: of ``mesh_of``.
        splits: whether there are several tensor ranks.
        param_dtype: dtype of gathered weights, None for that of the masters.
        reshard_after_forward: drop a block's whole weights between forward and backward.
    """
    settings = FSDP2Config(
        # Casting inputs would round the old log-probabilities of a micro-batch.
        mp_policy=MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False),
        tp_plan=_plan_of(model) if splits else None,
        enable_fsdp2_prefetch=False,
        reshard_after_forward=reshard_after_forward,
    )
    context = MeshContext.from_meshes(mesh, strategy_config=settings)
    return parallelize_model(model, context)  # type: ignore[no-any-return]


def _plan_of(model: nn.Module) -> dict[str, Any]:
    lm: Any = model.get_submodule("lm")
    plan = PLANS[lm.config.model_type](lm)
    return {f"lm.{name}": style for name, style in plan.items() if not set(name.split(".")) & set(LEFT_WHOLE)}


def add_up_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Bring the gradients of what tensor ranks hold whole together; once per mini-batch, before they are clipped."""
    synchronize_tp_replica_gradients([model], mesh)
