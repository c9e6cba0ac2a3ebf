"""VeOmni's parallelizer around a model of ours. Its package is imported when this module is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from veomni.arguments.arguments_types import MixedPrecisionConfig
from veomni.distributed.parallel_state import init_parallel_state
from veomni.distributed.torch_parallelize import build_parallelize_model


def make_groups(ranks: int, device: torch.device) -> None:
    """Its process groups over all processes, once for all models; ``ranks`` share the parameters."""
    init_parallel_state(dp_size=ranks, dp_shard_size=ranks, device_type=device.type)


def parallelize(model: nn.Module, blocks: Sequence[str], *, reshard_after_forward: bool) -> nn.Module:
    """Shard a model whose parameters are on the meta device; afterwards they have memory and no numbers.

    Args:
        model: of ours.
        blocks: names of the classes that are sharded one by one.
        reshard_after_forward: drop a block's whole weights between forward and backward.
    """
    return build_parallelize_model(  # type: ignore[no-any-return]
        model,
        init_device="meta",
        should_skip_hf_weight_load=True,
        mixed_precision=MixedPrecisionConfig(enable=False),
        enable_gradient_checkpointing=False,
        enable_reshard_after_forward=reshard_after_forward,
        basic_modules=list(blocks),
    )
