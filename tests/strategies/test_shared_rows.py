"""Rows that some data ranks share and others do not, as the plan says: the numbers are those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import FixedRun, Outcome, check_equal

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
