"""Rows that some data ranks share and others do not, as the plan says: the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import merge
from rlmodule.core.slices import SlicePlace
from rlmodule.experience.scoring import RowSlice, whole_rows
from rlmodule.models.policy import PolicyModel
from rlmodule.training.reduction import reduce_metrics
from strategies.parts.collectives import GroupCollectives
from strategies.parts.mesh import Mesh
from strategies.parts.shared_row import SharedRow
from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import FixedRun, Outcome, check_equal
from tests.strategies.test_ulysses import CASES, CPU, ROWS, Step, check_steps, policy_of, step_of, totals_of

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

# Of four ranks with 40 tokens each: a sample that all of them share, some that two share, and short ones.
LENGTHS = (
    (9, 110),
    (5, 60),
    (4, 3),
    (3, 20),
    (2, 9),
    (3, 2),
    (2, 31),
    (4, 55),
    (3, 5),
    (2, 2),
    (5, 48),
    (2, 7),
    (3, 90),
)
HEAVY_TAILED = FixedRun(lengths=tuple((p, r, r - r % 3) for p, r in LENGTHS), mini_batch_size=6, budget=160)
SHARED = replace(HEAVY_TAILED, budget=40, prepare=lambda strategy: strategy.share_rows(4))

# Two query heads and one for keys and values: a row of four ranks is cut into two parts.
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
IN_PARTS = replace(SHARED, architecture=FEW_HEADS, prepare=lambda strategy: strategy.share_rows(4, 2))

LAYOUTS = [
    ("ddp", {}),
    ("fsdp2", {}),
    ("fsdp2", {"dp_replicate": 2, "reduce_every_micro_batch": False}),
    ("fsdp", {}),
    ("deepspeed", {"stage": 1}),
    ("deepspeed", {"stage": 2}),
    ("deepspeed", {"stage": 3}),
]


def label(value: object) -> str:
    return "-".join(f"{k}={v}" for k, v in value.items()) or "default" if isinstance(value, dict) else str(value)


@pytest.fixture(scope="module")
def reference() -> Outcome:
    return run_on_ranks(1, lambda rank: HEAVY_TAILED.fit())[0]


@pytest.mark.parametrize(("backend", "options"), LAYOUTS, ids=label)
def test_every_strategy_trains_rows_of_mixed_widths_as_one_process_does(reference, backend, options):
    run = SHARED.with_options(backend, **options)
    outcomes = run_on_ranks(4, lambda rank: run.fit(4, rank))
    check_equal(reference, outcomes)
    for step in outcomes[0].metrics:
        assert step["balance/shared_rows"] > 0
        assert step["balance/peak_tokens"] <= 40


@pytest.fixture(scope="module")
def of_few_heads() -> Outcome:
    return run_on_ranks(1, lambda rank: replace(HEAVY_TAILED, architecture=FEW_HEADS).fit())[0]


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "fsdp", "deepspeed"])
def test_rows_of_more_ranks_than_heads_train_as_on_one_process(of_few_heads, backend):
    run = IN_PARTS.with_options(backend)
    outcomes = run_on_ranks(4, lambda rank: run.fit(4, rank))
    check_equal(of_few_heads, outcomes)
    assert all(step["balance/shared_rows"] > 0 for step in outcomes[0].metrics)


# ---- families and losses: micro-steps of (first rank, width, samples); one without samples is a dummy

PLAN = (
    ((0, 4, (0, 3)),),
    ((0, 2, (1,)), (2, 1, (2,)), (3, 1, ())),
    ((0, 1, ()), (1, 1, (4,)), (2, 2, ())),
)


def step_by_plan(
    policy: PolicyModel, objective: Objective, layout: Layout, sequences: Mapping[int, SharedRow]
) -> tuple[Step, dict[int, Tensor]]:
    """One mini-batch of five samples in three micro-steps, and the log-probabilities of the samples that are here."""
    totals, policy.sequences = totals_of(ROWS, layout), sequences
    metrics, logprobs, slices, held = [], [], [], []
    for cells in PLAN:
        first, width, samples = next(cell for cell in cells if cell[0] <= layout.rank < cell[0] + cell[1])
        place = SlicePlace(width, layout.rank - first, layout.parts_of(width))
        batch = DynamicCollator().pack([ROWS[p] for p in samples], totals, samples, place)
        assert (batch.width, batch.place) == (width, layout.rank - first)
        share = objective.for_micro_batch(batch, totals, sequences.get(width))
        policy(batch, objective=share).backward()
        metrics.append(share.metrics)
        logprobs.append(policy(batch).logprob)
        slices.append(RowSlice(batch.width, batch.places))
        held.append(samples)
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= layout.world_size
    merged = reduce_metrics(merge(metrics), layout, GroupCollectives(CPU))
    step = Step(torch.empty(0), torch.empty(0), gradients, {name: m.result for name, m in merged.items()})
    strategy: Any = SimpleNamespace(sequence_of=sequences.get)
    rows = zip(held, whole_rows(strategy, logprobs, slices), strict=True)
    return step, {p: part for samples, row in rows for p, part in by_sample(samples, row).items()}


def by_sample(samples: tuple[int, ...], row: Tensor) -> dict[int, Tensor]:
    return dict(zip(samples, row.split([int(ROWS[p].sample.loss_mask.sum()) for p in samples]), strict=True))


def all_cases(rank: int, parts: int) -> list[tuple[Step, dict[int, Tensor]]]:
    layout = Layout(4, rank, max_sp_size=4, max_cp_size=parts)
    sequences = SharedRow.by_width(Mesh.of_running("cpu"), CPU, layout)
    assert [sequences[width].num_parts for width in (2, 4)] == [layout.parts_of(width) for width in (2, 4)]
    return [step_by_plan(policy_of(**model), objective, layout, sequences) for model, objective in CASES]


@pytest.fixture(scope="module")
def uncut() -> list[Step]:
    return [step_of(policy_of(**model), objective, Layout(), None) for model, objective in CASES]


@pytest.mark.parametrize("parts", [1, 2, 4], ids=["by heads", "by heads and context", "by context"])
def test_families_and_losses_have_the_gradients_and_scores_of_whole_rows(uncut, parts):
    """Windows, sinks, fewer heads than ranks, recomputed blocks and losses of whole sequences."""
    by_rank = run_on_ranks(4, all_cases, parts)
    check_steps(uncut, [[step for step, _ in cases] for cases in by_rank], has_every_sample=False)
    for number, expected in enumerate(uncut):
        wanted = by_sample((0, 1, 2, 3, 4), expected.logprob)
        scores = [cases[number][1] for cases in by_rank]
        assert [sorted(found) for found in scores] == [[0, 1, 3], [0, 1, 3, 4], [0, 2, 3], [0, 3]]
        for found in scores:
            for position, logprob in found.items():
                torch.testing.assert_close(logprob, wanted[position], rtol=1e-6, atol=1e-6)
