"""The memory model against bytes that are counted while ranks train: within 15 %."""

from __future__ import annotations

import pytest

from tests.run.planning.measured import CASES, Case, measure, predict

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


QUICK = [case for case in CASES if case.name in ("single", "fsdp2", "deepspeed stage=3 bucket_numel=50000")]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.name} {case.precision}")
def test_the_model_agrees_with_what_is_counted(case: Case) -> None:
    """Some strategies, the smallest of three sizes; ``benchmarks/memory.py`` measures all."""
    expected, _ = predict(case, "1.3M")
    assert expected == pytest.approx(measure(case, "1.3M"), rel=0.15)
