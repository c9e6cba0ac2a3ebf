"""Rows cut by context, alone and together with heads: log-probs, entropies, gradients and metrics of the uncut row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlmodule.algorithm.objective import Objective
from rlmodule.core.layout import Layout
from rlmodule.losses.gspo import GSPO
from strategies.parts.mesh import Mesh
from strategies.parts.shared_row import SharedRow
from tests.helpers.ranks import run_on_ranks
from tests.strategies.test_ulysses import (
    CPU,
    GEMMA,
    ROWS,
    SINKS,
    WINDOWED,
    SequenceRatio,
    Step,
    check_steps,
    objective_of,
    policy_of,
    row_of,
    step_of,
)

pytestmark = pytest.mark.ranks

TWO_HEADS = {"kv_heads": 1, "num_attention_heads": 2}  # fewer than the four ranks that share a row
CASES: list[tuple[dict[str, Any], Objective, bool]] = [
    ({"kv_heads": 4}, objective_of(), False),
    ({"kv_heads": 1}, objective_of(mode="prompt-mean"), True),
    ({"kv_heads": 2, **WINDOWED}, objective_of(), True),
    ({"kv_heads": 2, **GEMMA}, objective_of(), False),
    ({"kv_heads": 2, **SINKS}, objective_of(), True),
    ({"kv_heads": 2, "recompute": "full"}, objective_of(SequenceRatio()), False),
    ({"kv_heads": 1, "recompute": "selective"}, objective_of(GSPO(clip_ratio_low=0.3, clip_ratio_high=0.3)), True),
    (TWO_HEADS, objective_of(), False),
]
# Pairs of responses to one prompt, so that segments have prefixes; long enough for chunks of several tokens.
PAIRS = [row_of(2 * (i // 2), 9, 5 + 3 * i) for i in range(5)]


def of_case(case: tuple[dict[str, Any], Objective, bool], layout: Layout, sequence: SharedRow | None) -> Step:
    model, objective, shares = case
    return step_of(policy_of(**model), objective, layout, sequence, PAIRS if shares else ROWS, share_prompts=shares)


def on_rank(rank: int, cases: list[Any], sp_size: int, cp_size: int) -> list[Step]:
    mesh = Mesh.of_running("cpu", sp_size=sp_size * cp_size, cp_size=cp_size)
    return [of_case(case, mesh.layout, SharedRow.of(mesh, CPU)) for case in cases]


@pytest.fixture(scope="module")
def uncut() -> list[Step]:
    return [of_case(case, Layout(), None) for case in CASES]


@pytest.mark.parametrize(
    ("world_size", "sp_size", "cp_size"),
    [(2, 1, 2), (4, 1, 4), (4, 2, 2)],
    ids=["cp2", "cp4", "sp2 x cp2"],
)
def test_cutting_the_row_by_context_changes_nothing(uncut, world_size, sp_size, cp_size):
    by_rank = run_on_ranks(world_size, on_rank, CASES, sp_size, cp_size)
    check_steps(uncut, by_rank, has_every_sample=True)


def test_data_ranks_beside_it_change_nothing(uncut):
    few = [0, 2]
    by_rank = run_on_ranks(4, on_rank, [CASES[i] for i in few], 1, 2)
    check_steps([uncut[i] for i in few], by_rank, has_every_sample=False)


def test_the_pairs_share_their_prompts():
    assert PAIRS[0].sample.prompt.ids == PAIRS[1].sample.prompt.ids


def half_precision(rank: int) -> tuple[Tensor, Tensor]:
    case = ({"kv_heads": 1, "precision": "bf16-mixed"}, objective_of(), False)
    [step] = on_rank(rank, [case], 1, 2)
    return step.logprob, step.gradients["lm.model.embed_tokens.weight"]


def test_half_precision_travels_as_it_is():
    expected = of_case(({"kv_heads": 1, "precision": "bf16-mixed"}, objective_of(), False), Layout(), None)
    gradient = expected.gradients["lm.model.embed_tokens.weight"]
    for logprob, got in run_on_ranks(2, half_precision):
        torch.testing.assert_close(logprob, expected.logprob, rtol=0, atol=0.02)
        torch.testing.assert_close(got, gradient, rtol=0, atol=0.02 * float(gradient.abs().max()))
