"""Expert parallelism by a model's own plan (transformers' ``base_model_ep_plan``): ranks hold different experts.

The ranks of a layer's experts are those that share everything else, seen in another way: ``ep_size`` neighbours hold
all experts together, and the groups of them shard what each holds. Tokens travel to the rank of their expert and back,
two exchanges per layer each way, differentiable. So an expert sees the tokens of every data rank, and its gradient is a
sum where all others are averages. The entry points of transformers are semi-public, so only this file calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.expert_parallel import apply_expert_parallelism

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.parameters import DISPATCHED

EXCHANGE = "all_to_all"  # the only implementation that is differentiable where ranks hold different tokens


@dataclass(frozen=True)
class ExpertMesh:
    """The running processes as the experts see them.

    Args:
        layout: sizes, and this process's place.
        grid: dimensions ``stage``, ``replicate``, ``shard`` and ``experts``, the last one nearest.
        tensor: processes that share every other matrix, and so their tokens; one process where there are none.
    """

    layout: Layout
    grid: DeviceMesh
    tensor: DeviceMesh

    @classmethod
    def of_running(cls, layout: Layout, device: str, tensor: DeviceMesh, *, replicas: int = 1) -> ExpertMesh:
        """Lay it over the running process group; every process calls it."""
        shards = layout.stage_size // (replicas * layout.ep_size)
        sizes = (layout.pp_size, replicas, shards, layout.ep_size)
        names = ("stage", "replicate", "shard", "experts")
        return cls(layout, init_device_mesh(device, sizes, mesh_dim_names=names), tensor)

    @property
    def sharding(self) -> DeviceMesh:
        """Processes with the same experts, over which these are sharded: one dimension, or (replicas, shards)."""
        return self.grid["shard"] if self.grid["replicate"].size() == 1 else self.grid["replicate", "shard"]

    def plan(self, lm: Any) -> dict[str, str]:
        """Name of each module and parameter of ``lm`` that experts are cut by -> what transformers does with it.

        Raises:
            ConfigError: the model has no plan, or an adapter sits in its experts.
        """
        layout = self.layout
        adapted = next((name for name, module in lm.named_modules() if type(module).__name__ == "ParamWrapper"), None)
        if adapted is not None:
            raise ConfigError(
                key="model.lora.target_modules",
                got=adapted,
                because=f"strategy.ep_size={layout.ep_size} deals out experts, and their adapters cannot go with them",
                fix="List layers of the attention (q_proj, k_proj, v_proj, o_proj), or use strategy.ep_size=1",
            )
        if DISPATCHED not in lm.ep_plan.values():
            raise _refused(layout, f"{type(lm).__name__} has no experts, or brings no plan to spread them")
        plan: dict[str, str] = lm._expand_parallel_plan(dict(lm.ep_plan))  # empty in a stage without experts
        return plan

    def cut(self, lm: Any, plan: Mapping[str, str]) -> list[nn.Module]:
        """Leave each rank its share of the experts of ``lm``, and let tokens travel; returns the modules with experts.

        Raises:
            ConfigError: the experts cannot be dealt out.
        """
        modules = [lm.get_submodule(name) for name, style in plan.items() if style == DISPATCHED]
        try:
            apply_expert_parallelism(lm, self.grid["experts"], self.tensor, dict(plan), EXCHANGE)
        except ValueError as error:
            raise _refused(self.layout, str(error).rstrip(".")) from None
        for module in modules:
            for key, parameter in module.named_parameters():
                assert isinstance(parameter, DTensor), f"the plan of {type(lm).__name__} leaves {key} whole"
        return modules

    def shard(self, experts: nn.Module, fully_shard: Callable[..., object]) -> None:
        """Shard the experts that this rank holds over the ranks that hold the same, and set how gradients are averaged.

        Args:
            experts: a module that was cut.
            fully_shard: torch's, with everything bound but the mesh and the placement.
        """
        shards = self.grid["shard"].size()
        fully_shard(experts, mesh=self.sharding, shard_placement_fn=partial(_divided_dimension, shards=shards))
        assert isinstance(experts, FSDPModule)
        experts.set_gradient_divide_factor(float(self.layout.dp_sp_size))
        # Gloo can only sum before it divides; torch 2.13 would divide twice where there is nothing to sum.
        experts.set_force_sum_reduction_for_comms(shards > 1)


def _divided_dimension(parameter: nn.Parameter, shards: int) -> Shard | None:
    """The dimension that is sharded: whole experts where they can be dealt out evenly, else the next even one."""
    assert isinstance(parameter, DTensor), "experts were cut"
    sizes = parameter.to_local().shape
    if shards > 1 and sizes[0] % shards == 0:
        return None
    return next((Shard(dim) for dim in range(1, len(sizes)) if sizes[dim] % shards == 0), None)


def _refused(layout: Layout, because: str) -> ConfigError:
    return ConfigError(key="strategy.ep_size", got=layout.ep_size, because=because, fix="Use strategy.ep_size=1")


def check_expert_degree(processes: int, ep_size: int, *, tp_size: int = 1) -> None:
    """Check, before any process is started, that ``ep_size`` neighbours can share experts.

    Args:
        processes: of one stage of one copy of the model.
        ep_size: neighbours that share experts.
        tp_size: neighbours that have the same tokens.

    Raises:
        ConfigError: it is no multiple of the tensor ranks, or does not divide the processes.
    """
    if ep_size > 1 and (ep_size % tp_size or processes % ep_size):
        raise ConfigError(
            key="strategy.ep_size",
            got=ep_size,
            because=f"it must be a multiple of tp_size={tp_size} and divide the {processes} processes of one copy of "
            "the model, or of a stage of it",
            fix=f"Use one of {[n for n in range(tp_size, processes + 1, tp_size) if processes % n == 0]}, or 1",
        )
