"""Megatron-core's distributed optimizer: data ranks share the moments, each has those of its part of a flat buffer.

Its ``DistributedDataParallel`` lays parameters and gradients into flat buffers, which a step cuts into equal parts:
sums of gradients are scattered, each rank updates its part of the parameters, and the parts are gathered
(arXiv:1910.02054, first stage). The optimizer inside is the run's own AdamW, whose groups get parts in the place of
parameters; the norm, clipping and skipped steps are the strategy's, as everywhere.

Leaves out what tensor ranks and stages add up before or after (``strategies/megatron.py``), and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlmodule.core.parameters import ADAM_STATES, empty_states
from strategies.parts.megatron_api import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    OptimizerConfig,
    ProcessGroupCollection,
    on_device,
    parallel_state,
    types_of_cuda,
)

STEP, *MOMENTS = ADAM_STATES
Moments = Mapping[nn.Parameter, Mapping[str, Tensor]]  # parameter -> name of a state -> the state, whole


class SharedMoments:
    """A model that trains, laid into flat buffers, and what this rank has of its optimizer.

    Args:
        model: whose parameters are laid into buffers; they stay the same objects, under the same names.
        layer_config: Megatron's configuration of its layers.
        group: data ranks, which hold the same parameters.
        device: of the parameters.
        exchange_device: of tensors that the group sends (gloo: cpu, nccl: the GPU).
        at_both_ends: the weight that the first and the last stage share, which both must cut alike.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_config: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        exchange_device: torch.device,
        at_both_ends: nn.Parameter | None,
    ) -> None:
        self.group, self.device, self.exchange_device = group, device, exchange_device
        if at_both_ends is not None:
            at_both_ends.shared_embedding = True  # type: ignore[attr-defined]  # Megatron gives it a bucket of its own
        groups = ProcessGroupCollection(
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            ep=parallel_state.get_expert_model_parallel_group(),
            dp=group,
            dp_cp=group,
            expt_dp=group,
        )
        with on_device(device):
            self._flat = DistributedDataParallel(
                layer_config, DistributedDataParallelConfig(use_distributed_optimizer=True), model, pg_collection=groups
            )
        self.parts: dict[nn.Parameter, Tensor] = {}  # what this rank updates of each parameter, where it has any of it
        self._optimizer: Any = None

    def attach(self, optimizer: Optimizer) -> None:
        """Give the groups of ``optimizer``, an AdamW over the parameters, this rank's parts of them."""
        with on_device(self.device), types_of_cuda():
            self._optimizer = DistributedOptimizer(
                optimizer,
                OptimizerConfig(optimizer="adam", use_distributed_optimizer=True),
                grad_scaler=None,
                init_state_fn=None,
                model_chunks=[self._flat],
                per_model_buffers={0: self._flat.buffers},
                data_parallel_group=self.group,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
        groups = zip(self._optimizer.model_fp32_groups, self._optimizer.shard_fp32_groups, strict=True)
        self.parts = {p: part for whole, cut in groups for p, part in zip(whole, cut, strict=True)}

    # ---- a step, in this order

    def show_gradients(self) -> None:
        """Make what backward passes have summed up in the buffer readable as the gradients of the parameters."""
        for parameter in self._flat.params_with_grad:
            parameter.grad = parameter.main_grad

    def scatter_gradients(self) -> None:
        """Leave this rank the mean over data ranks of its part of the gradients; the rest of the buffer is void."""
        self._flat.finish_grad_sync()

    def give_gradients(self) -> None:
        """Give the parts in the optimizer's groups their gradients."""
        self._optimizer.prepare_grads()

    def gather_parameters(self) -> None:
        """Bring together the parts of the parameters that ranks have updated."""
        self._flat.start_param_sync()

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self._flat.params_with_grad:
            parameter.grad = None
        self._flat.zero_grad_buffer()

    # ---- what a checkpoint holds

    def collected(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        """(parameter, its whole states) of those that fall to this rank; ranks keep one in turn, and all call it."""
        state = self._optimizer.state
        steps = [float(of_part[STEP]) for of_part in state.values() if STEP in of_part]
        step = torch.tensor(max(steps, default=0.0), device=self.exchange_device)
        dist.all_reduce(step, dist.ReduceOp.MAX, group=self.group)
        if not float(step):
            return
        for place, parameter in enumerate(self._flat.params_with_grad):
            keeper = place % dist.get_world_size(self.group)
            states = {STEP: step.to(self.device)}
            for name in MOMENTS:
                whole = torch.zeros_like(parameter, device=self.exchange_device)
                if parameter in self.parts:
                    whole.view(-1)[self._range(parameter)] = state[self.parts[parameter]][name].to(whole.device)
                dist.reduce(whole, group_dst=keeper, group=self.group)
                states[name] = whole.to(self.device)
            if keeper == dist.get_rank(self.group):
                yield parameter, states

    def empty(self) -> Moments:
        """Whole states of every parameter, zero, to be filled and then given to ``put``."""
        return {parameter: empty_states({}, parameter) for parameter in self._flat.params_with_grad}

    def put(self, moments: Moments) -> None:
        """Keep this rank's parts of whole states."""
        for parameter, part in self.parts.items():
            self._optimizer.state[part] = {
                name: whole.clone() if name == STEP else whole.view(-1)[self._range(parameter)].clone()
                for name, whole in moments[parameter].items()
            }

    def _range(self, parameter: nn.Parameter) -> slice:
        """Where this rank's part lies in the parameter, read in one line; both are views of one buffer."""
        part = self.parts[parameter]
        start = part.storage_offset() - parameter.storage_offset()
        return slice(start, start + part.numel())
