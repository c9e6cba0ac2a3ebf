"""Strategies whose models may be cut into pipeline stages: their loops over micro-batches, and names across stages.

Every stage gives what the last one computes: metrics and outputs are small, and so every process goes on as tensor
ranks do, with the numbers of its row. Leaves out the schedule (``pipeline.py``) and how a model is cut (``stages.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlmodule.core.contract import Backward, MicroBatchLoss, ModelObjective
from rlmodule.core.errors import TrainingError
from rlmodule.core.metrics import Metrics, from_rows, to_rows
from rlmodule.core.parameters import tied
from rlmodule.core.types import MicroBatch, StepTotals, TokenOutputs
from strategies.parts.failures import first_told
from strategies.parts.gathering import Casting, Names, Part, as_held, from_bytes, gathered, in_buckets, to_bytes
from strategies.parts.pipeline import Pipeline, StageForward
from strategies.parts.saved_state import states_kept
from strategies.parts.sharded import ShardedStrategy
from strategies.parts.stages import Stage, cut
from strategies.parts.strategy_mixin import local


class PipelinedStrategy(ShardedStrategy):
    """Base of sharded backends with ``strategy.pp_size``; without stages it adds nothing.

    A backend calls ``cut_into_stages`` at the beginning of ``wrap``; one that cuts models in a way of its own overrides
    that.
    """

    _pipelines: dict[str, Pipeline]
    _stages: dict[str, Stage]
    _at_both_ends: set[nn.Parameter]  # that the first and the last stage share
    _wholes: dict[str, list[tuple[tuple[str, ...], Tensor]]]  # all names and the likeness of each parameter, uncut

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Remember the parameters of each whole model, then cut and shard the models."""
        if not self._models:
            self._pipelines, self._stages = {}, {}
            self._wholes = {
                name: [(names, parameter.detach().to("meta")) for names, parameter in tied(model)]
                for name, model in models.items()
            }
        problem: TrainingError | None = None
        try:
            super().shard(models)
        except TrainingError as error:  # weights that one stage alone reads
            problem = error
        told = None if problem is None else str(problem)
        first = told if self.mesh.pipeline_group is None else first_told(told, None)
        if first is not None:
            raise problem or TrainingError(first)
        for pipeline in self._pipelines.values():  # every stage has its part of every model by now
            pipeline.connect()
        self._at_both_ends = {parameter for name in self._stages for parameter in self._shared(name)}

    def cut_into_stages(self, name: str, model: nn.Module, dtype: torch.dtype) -> None:
        """Keep this process's stage of a model, where there are stages; its embedding computes in ``dtype``."""
        group = self.mesh.pipeline_group
        if group is not None:
            stage = cut(model, self.layout.pp_rank, self.layout.pp_size, dtype)
            shape: Callable[[MicroBatch], tuple[int, ...]] = lambda batch: (len(batch.input_ids), stage.width)  # noqa: E731
            self._stages[name] = stage
            self._pipelines[name] = Pipeline(group, shape, self.root_device, self.exchange_device)

    # ---- loops

    def forward_backward(
        self,
        name: str,
        micro_batches: Sequence[MicroBatch],
        objective: ModelObjective,
        totals: StepTotals,
        backward: Backward,
    ) -> list[Metrics]:
        """One forward, one backward in turn; then both ends add up the gradient of the weight they share."""
        pipeline = self._pipelines.get(name)
        if pipeline is None:
            return super().forward_backward(name, micro_batches, objective, totals, backward)
        losses: list[MicroBatchLoss] = []

        def run_back(index: int, out: Tensor, gradient: Tensor | None) -> None:
            with self.micro_batch(name, is_last=index == len(micro_batches) - 1):
                backward(out, gradient=gradient)

        pipeline.forward_backward(micro_batches, self._loss_of_stage(name, objective, totals, losses), run_back)
        self.reduce_gradients(name)  # before both ends add up, or they would add in different orders
        for parameter in self._shared(name):
            assert parameter.grad is not None, "both ends use the weight that they share"
            pipeline.add_other_end(local(parameter.grad))
        return metrics_of_last(pipeline, losses)

    def evaluate(
        self, name: str, micro_batches: Sequence[MicroBatch], objective: ModelObjective, totals: StepTotals
    ) -> list[Metrics]:
        """Forward through all stages, for the metrics of the loss."""
        pipeline = self._pipelines.get(name)
        if pipeline is None:
            return super().evaluate(name, micro_batches, objective, totals)
        losses: list[MicroBatchLoss] = []
        with self.eval_mode(name):
            pipeline.forward(micro_batches, self._loss_of_stage(name, objective, totals, losses))
        return metrics_of_last(pipeline, losses)

    def _loss_of_stage(
        self, name: str, objective: ModelObjective, totals: StepTotals, losses: list[MicroBatchLoss]
    ) -> StageForward[Tensor]:
        """Forward of this stage; the last one appends the loss of each micro-batch to ``losses``."""
        model, stage, is_last = self._wrapped[name], self._stages[name], self._pipelines[name].is_last

        def run(micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
            sequence = self.sequence_of(micro_batch.width)
            loss = objective.for_micro_batch(micro_batch, totals, sequence) if is_last else None
            losses.extend([] if loss is None else [loss])
            with stage.given(hidden):
                return model(micro_batch, objective=loss)  # type: ignore[no-any-return]

        return run

    def forward(
        self, name: str, micro_batches: Iterable[MicroBatch], outputs: frozenset[str], *, with_adapter: bool = True
    ) -> list[TokenOutputs]:
        """Forward through all stages; the outputs of the last on all of them."""
        pipeline = self._pipelines.get(name)
        if pipeline is None:
            return super().forward(name, micro_batches, outputs, with_adapter=with_adapter)
        options: dict[str, Any] = {} if with_adapter else {"with_adapter": False}

        def run(micro_batch: MicroBatch, hidden: Tensor | None) -> TokenOutputs | Tensor:
            with self._stages[name].given(hidden):
                return self._wrapped[name](micro_batch, outputs=outputs, **options)  # type: ignore[no-any-return]

        with self.eval_mode(name):
            answers: list[TokenOutputs] = pipeline.forward(micro_batches, run)
        on_host = pipeline.from_last([answer.to("cpu") for answer in answers])
        return [answer.to(self.root_device) for answer in on_host]

    # ---- names and weights across stages

    def named_parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """By the first of its names in the whole model, also where a stage holds it under another one only."""
        names = self._stages[name].names if name in self._stages else {}
        for key, parameter in super().named_parameters(name):
            yield names.get(key, key), parameter

    def copies_of(self, parameter: nn.Parameter) -> int:
        """Twice as many of the weight that the first and the last stage share."""
        return super().copies_of(parameter) * (2 if parameter in self._at_both_ends else 1)

    def _shared(self, name: str) -> list[nn.Parameter]:
        """The weight that the first and the last stage both hold, where there is one and it trains."""
        shared = self._stages[name].shared
        return [p for key, p in self.named_parameters(name) if key == shared and p.requires_grad]

    def full_parameters(self, name: str, cast: Casting = as_held) -> Iterator[tuple[Names, Tensor]]:
        """All-gather a bucket of tensors at a time, on the stage that holds them, which gives them to the others."""
        if name not in self._stages:
            own = tied(self._models[name])
            yield from gathered(Part.of(names, p.detach(), self.root_device, cast) for names, p in own)
            return
        held_by = self._stages[name].held_by
        mine, pipeline = dict(self.named_parameters(name)), self._pipelines[name]
        wanted = [(names, cast(names, like)) for names, like in self._wholes[name]]
        for holder, run in groupby(wanted, lambda item: held_by[item[0][0]]):
            for bucket in in_buckets(run, lambda item: item[1].nbytes):
                flat = torch.empty(sum(like.nbytes for _, like in bucket), dtype=torch.uint8, device=self.root_device)
                if holder == pipeline.rank:
                    parts = [Part.of(names, mine[names[0]].detach(), self.root_device, cast) for names, _ in bucket]
                    flat = to_bytes([tensor for _, tensor in gathered(parts)])
                whole = from_bytes(pipeline.broadcast(holder, flat), [like for _, like in bucket])
                yield from zip((names for names, _ in bucket), whole, strict=True)

    def whole_model(self, name: str) -> nn.Module:
        """The copy that was made before the model was cut."""
        return self._copies_to_sample[name].model if name in self._stages else super().whole_model(name)

    # ---- settings of optimizers, of which Lightning saves those of the first process

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Settings of the groups of the stage that has most: one has no biases, another no adapter beside a head."""
        mine, group = super().optimizer_state(optimizer), self.mesh.pipeline_group
        if group is None:
            return mine
        everyone: list[Any] = [None] * self.layout.pp_size
        dist.all_gather_object(everyone, mine, group=group)
        return max(everyone, key=lambda state: len(state["param_groups"]))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Compare the groups of this stage with those that they are parts of."""
        states = checkpoint["optimizer_states"]
        if self.mesh.pipeline_group is not None:
            pairs = zip(self.models_and_optimizers(), states, strict=True)
            states = [{"param_groups": groups_like(o.param_groups, state["param_groups"])} for (_, o), state in pairs]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})


def groups_like(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For each group of a stage a saved one with the same states, where a stage has fewer of them."""
    if len(groups) >= len(saved):
        return list(saved)
    by_states = {states_kept(group): group for group in saved}
    return [by_states.get(states_kept(group), saved[0]) for group in groups]


def metrics_of_last(pipeline: Pipeline, losses: Sequence[MicroBatchLoss]) -> list[Metrics]:
    """The metrics of each micro-batch, which the last stage has computed, on every stage."""
    tables = pipeline.from_last([to_rows(loss.metrics) for loss in losses])
    return [from_rows(names, rows) for names, rows in tables]
