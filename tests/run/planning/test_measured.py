"""The memory model against bytes that are counted while a rank trains: within 15 %, under every strategy."""

from __future__ import annotations

import pytest

from tests.run.planning.measured import CASES, Case, measure, predict

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.precision}")
def test_the_model_agrees_with_what_is_counted(case: Case) -> None:
    """The smallest of three sizes; ``python -m tests.run.planning.measured`` prints all of them."""
    expected, _ = predict(case, "1.3M")
    assert expected == pytest.approx(measure(case, "1.3M"), rel=0.15)
