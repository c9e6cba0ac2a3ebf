"""What rlmodule asks of a strategy: lists of micro-batches in, metrics or outputs in the same order out.

A backend may run them in any order, and may build models of its own; toys that do so train to the same numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.contract import Backward, ModelObjective, ModelSpec, StrategyClass
from rlmodule.core.metrics import Metrics, merge
from rlmodule.core.types import MicroBatch, MiniBatch, StepTotals
from rlmodule.module import RLModule
from rlmodule.records.metrics_log import read_records
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from rlmodule.training.reduction import reduce_metrics
from strategies.ddp import DDPStrategy
from strategies.fsdp2 import FSDP2Strategy
from strategies.parts.strategy_mixin import local
from strategies.single import SingleStrategy
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import SMALL, compose, numbers
from tests.helpers.tiny import Stepper, mixed_rows, share_rows, single, tiny_policy
from tests.strategies.fixed_runs import FixedRun, Outcome, check_equal

pytestmark = pytest.mark.filterwarnings("ignore")

RUN = FixedRun()
LOGPROB = frozenset({"logprob"})


# ---- a backend owns its loops


class ForwardsFirst:
    """All forward passes, then all backward passes, last one first: the order of GPipe (arXiv:1811.06965)."""

    def forward_backward(
        self: Any,
        name: str,
        micro_batches: Sequence[MicroBatch],
        objective: ModelObjective,
        totals: StepTotals,
        backward: Backward,
    ) -> list[Metrics]:
        losses = [objective.for_micro_batch(batch, totals, self.sequence_of(batch.width)) for batch in micro_batches]
        pairs = zip(micro_batches, losses, strict=True)
        scalars = [self.wrapped(name)(batch, objective=loss) for batch, loss in pairs]
        for index in reversed(range(len(scalars))):
            with self.micro_batch(name, is_last=index == 0):
                backward(scalars[index])
        return [loss.metrics for loss in losses]


class SingleForwardsFirst(ForwardsFirst, SingleStrategy):
    pass


class FSDP2ForwardsFirst(ForwardsFirst, FSDP2Strategy):
    pass


class DDPBackToFront(DDPStrategy):
    """Micro-batches in the opposite order; DDP wants forward and backward of each side by side."""

    def forward_backward(self, name: str, micro_batches: Sequence[MicroBatch], *args: Any) -> list[Metrics]:
        return super().forward_backward(name, micro_batches[::-1], *args)[::-1]


@pytest.fixture(scope="module")
def reference() -> Outcome:
    return run_on_ranks(1, lambda rank: RUN.fit())[0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("toy", "world"),
    [(SingleForwardsFirst, 1), (DDPBackToFront, 2), (FSDP2ForwardsFirst, 2)],
    ids=["single", "ddp", "fsdp2"],
)
def test_a_strategy_that_schedules_micro_batches_otherwise_trains_to_the_same_numbers(reference, toy, world):
    run = FixedRun(strategy_class=toy)
    check_equal(reference, run_on_ranks(world, lambda rank: run.fit(world, rank)))


@pytest.mark.ranks
def test_a_schedule_that_lost_a_micro_batch_would_be_noticed(reference):
    class Forgetful(SingleStrategy):
        def forward_backward(self, name: str, micro_batches: Sequence[MicroBatch], *args: Any) -> list[Metrics]:
            return super().forward_backward(name, micro_batches[:-1], *args)

    run = FixedRun(strategy_class=Forgetful)
    with pytest.raises(AssertionError):
        check_equal(reference, run_on_ranks(1, lambda rank: run.fit()))


# ---- outputs and metrics, in input order, under every layout

LAYOUTS = {
    "single": ("single", 1, {}),
    "ddp": ("ddp", 2, {}),
    "fsdp": ("fsdp", 2, {}),
    "fsdp2": ("fsdp2", 2, {}),
    "zero 3": ("deepspeed", 2, {"stage": 3}),
    "sp2": ("ddp", 2, {"sp_size": 2}),
    "tp2": ("fsdp2", 2, {"tp_size": 2}),
    "sp2 x tp2": ("fsdp2", 4, {"sp_size": 2, "tp_size": 2}),
}


def outputs_and_losses(trainer: L.Trainer, module: RLModule) -> dict[str, Any]:
    """What the trained policy gives for the first mini-batch: per token, and as a loss."""
    strategy: Any = trainer.strategy
    mini_batch: MiniBatch = next(iter(trainer.datamodule.train_dataloader()))
    batches = mini_batch.micro_batches
    assert len(batches) > 1
    gradients = [local(p.grad).abs().sum() for p in module.parameters() if p.grad is not None]  # FSDP1 keeps zeros
    wanted = frozenset({"logprob", "entropy"})
    outputs = strategy.forward("policy", iter(batches), wanted)
    turned = strategy.forward("policy", batches[::-1], wanted)[::-1]
    tokens: dict[tuple[int, int], tuple[float, float]] = {}
    for batch, here, there in zip(batches, outputs, turned, strict=True):
        for name in sorted(wanted):
            assert here[name].shape == batch.labels.shape, "outputs are those of the slice that was given"
            assert torch.equal(here[name], there[name]), "each micro-batch has its own outputs, wherever it stands"
            assert not here[name].requires_grad
        keys = torch.stack([batch.sample_id[batch.sequence], batch.position_ids[batch.loss_positions]], 1).tolist()
        values = torch.stack([here["logprob"], here["entropy"]], 1).tolist()
        tokens |= {tuple(key): tuple(value) for key, value in zip(keys, values, strict=True)}
    parts = strategy.evaluate("policy", batches, module.trainables[0].objective, mini_batch.totals)
    assert len(parts) == len(batches)
    assert [local(p.grad).abs().sum() for p in module.parameters() if p.grad is not None] == gradients
    merged = reduce_metrics(merge(parts), strategy.layout, strategy.collectives)
    return {"tokens": tokens, "metrics": {name: metric.result for name, metric in merged.items()}}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return run_on_ranks(1, lambda rank: FixedRun(timer=outputs_and_losses).fit())[0].extra


@pytest.mark.ranks
@pytest.mark.parametrize("label", LAYOUTS)
def test_outputs_come_in_input_order_and_are_those_of_one_process(expected, label):
    backend, world, options = LAYOUTS[label]
    run = FixedRun(backend, options, timer=outputs_and_losses)
    found = [outcome.extra for outcome in run_on_ranks(world, lambda rank: run.fit(world, rank))]
    tokens = {key: values for rank in found for key, values in rank["tokens"].items()}
    assert tokens.keys() == expected["tokens"].keys(), "the ranks' tokens are those of the mini-batch"
    for key, values in expected["tokens"].items():
        assert tokens[key] == pytest.approx(values, rel=1e-4, abs=1e-5)
    for rank in found:
        assert rank["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)


# ---- memory

LENGTHS = ((3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2))


def mini_batch_of_many() -> MiniBatch:
    [mini_batch] = share_rows(mixed_rows(LENGTHS), BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=14))
    assert len(mini_batch.micro_batches) > 2
    return mini_batch


def test_the_graph_of_a_micro_batch_is_gone_before_the_next_one_runs():
    stepper, losses = Stepper(tiny_policy()), list[weakref.ref[Tensor]]()

    def backward(loss: Tensor, /, *, gradient: Tensor | None = None) -> None:
        assert all(loss() is None for loss in losses)
        losses.append(weakref.ref(loss))
        loss.backward(gradient)

    mini_batch = mini_batch_of_many()
    with stepper.strategy.train_mode("policy"):
        stepper.strategy.forward_backward(
            "policy", mini_batch.micro_batches, stepper.objective, mini_batch.totals, backward
        )
    assert len(losses) == len(mini_batch.micro_batches)


def test_micro_batches_may_be_packed_when_they_are_due():
    """Of an iterable no more than two are there: the one that was run, while the next one is made."""
    made: list[weakref.ref[MicroBatch]] = []

    def packed() -> Iterator[MicroBatch]:
        for batch in mini_batch_of_many().micro_batches:
            assert sum(ref() is not None for ref in made) <= 1
            copied = batch.to("cpu")
            made.append(weakref.ref(copied))
            yield copied
            del copied

    outputs = single({"policy": tiny_policy()}).forward("policy", packed(), LOGPROB)
    assert len(outputs) == len(made) > 2


def test_an_output_that_was_not_asked_for_is_not_there():
    strategy = single({"policy": tiny_policy()})
    [output, *_] = strategy.forward("policy", mini_batch_of_many().micro_batches, LOGPROB)
    assert output.entropy is None
    with pytest.raises(AssertionError, match="was not asked for entropy"):
        output["entropy"]


# ---- a strategy builds the models


class Recording(ForwardsFirst, SingleStrategy):
    """Builds the default models, and keeps what it was told of each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.specs: dict[str, ModelSpec] = {}
        self.built: dict[str, nn.Module] = {}

    def build(self, name: str, spec: ModelSpec) -> nn.Module:
        self.specs[name], self.built[name] = spec, super().build(name, spec)
        return self.built[name]


class Menu:
    """A registry with one strategy."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def lookup(self, model_type: str, backend: str, **place: str | None) -> StrategyClass:
        return self.strategy


def run_with(strategy: type, folder: Any) -> list[Any]:
    words = (*SMALL, "algorithm=ppo", "algorithm.use_kl_loss=true", "trainer.max_epochs=1", f"run_dir={folder}")
    run = Run.read(compose(*words), RunDirectory(folder), Menu(strategy))
    run.check()
    run.fit()
    return numbers(read_records(folder / "metrics.jsonl"))


def test_a_whole_run_asks_a_strategy_for_its_models_and_its_loops(tmp_path):
    """Policy, critic and reference: built by the strategy, trained in its order, to the numbers of the plain loop."""
    seen: list[Recording] = []

    class Seen(Recording):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.append(self)

    plain, toy = run_with(SingleStrategy, tmp_path / "plain"), run_with(Seen, tmp_path / "toy")
    assert len(toy) == len(plain) > 2
    for (kind, step, here), (_, _, there) in zip(toy, plain, strict=True):
        assert here == pytest.approx(there, rel=1e-4, abs=1e-6), f"{kind} {step}"
    strategy = seen[-1]
    assert {name: (spec.model_type, spec.is_trained) for name, spec in strategy.specs.items()} == {
        "policy": ("language_model", True),
        "reference": ("language_model", False),
        "critic": ("value_model", True),
    }
    assert [any(p.requires_grad for p in model.parameters()) for model in strategy.built.values()] == [
        spec.is_trained for spec in strategy.specs.values()
    ], "a strategy need not freeze"
    assert dict(strategy._models) == strategy.built
