"""All that is used of Megatron-core, checked for its version, and how it is brought to a device that is not CUDA.

Megatron-core (https://github.com/NVIDIA/Megatron-LM, arXiv:1909.08053) writes ``cuda`` in places where any device would
do. Leaves out the model that is built from it (``megatron_trunk.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from strategies.parts.releases import require_release

require_release("megatron-core", "0.16.1", strategy="megatron")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says at every import which optional packages it does without
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import (
        HAVE_TE,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import VocabParallelEmbedding
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

# Of graphs that are not used, and of an environment variable that matters on CUDA alone (docs/strategies.md).
warnings.filterwarnings("ignore", message="full scope is deprecated|When using async grad allreduce")
# It calls torch's collectives by names that torch 2.13 has deprecated.
warnings.filterwarnings("ignore", category=FutureWarning, message=r".torch\.distributed\.\w+. is deprecated")

__all__ = [
    "HAVE_TE",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "ModuleSpec",
    "OptimizerConfig",
    "ProcessGroupCollection",
    "TransformerConfig",
    "VocabParallelEmbedding",
    "build_module",
    "gather_from_sequence_parallel_region",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "join_groups",
    "on_device",
    "parallel_state",
    "types_of_cuda",
]


def join_groups(tp_size: int) -> None:
    """Make its process groups of neighbouring tensor ranks, once for all models of a process; they share experts too.

    It is told of no pipeline and no data ranks: stages and gradients are the strategy's own affair.
    """
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == tp_size:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp_size,
        expert_model_parallel_size=tp_size,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )


class _CudaMeans(TorchFunctionMode):
    """Calls of torch that name cuda get another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        if "cuda" in str(given.get("device", "")):
            given["device"] = self.device
        return func(*args, **given)


class _TypesOfCuda(TorchFunctionMode):
    """The type of a tensor has the name that it would have on CUDA, which is the only one that it is compared with."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        asked = func is torch.Tensor.type and isinstance(found, str)
        return f"torch.cuda.{found.rpartition('.')[2]}" if asked else found


def types_of_cuda() -> TorchFunctionMode:
    """Inside, tensors say that they are of CUDA's types, wherever they are."""
    return _TypesOfCuda()


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Inside, what Megatron-core makes on cuda is made on ``device``."""
    if device.type == "cuda":
        yield
        return
    before = torch.cuda.current_device
    torch.cuda.current_device = lambda: device  # type: ignore[assignment, return-value]
    try:
        with _CudaMeans(device):
            yield
    finally:
        torch.cuda.current_device = before
