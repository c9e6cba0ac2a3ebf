"""Checkpoints of strategies around other projects move as all others do; ``checkpoint_table.py`` measures every pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmodule.parity.layouts import ParityLayout, chosen
from tests.helpers.backends import needing
from tests.strategies.checkpoint_table import gone_on, markdown, written
from tests.strategies.fixed_runs import relative_difference

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

MOVES = [  # written by, read by strategies of one process and of several, and back to itself
    ("torchtitan", "torchtitan_tp2", ("single", "fsdp2_2", "torchtitan_tp2")),
    ("torchtitan", "fsdp2_2", ("torchtitan_2_tp2",)),
    ("automodel", "automodel_tp2", ("single", "fsdp2_2", "automodel_tp2")),
    ("automodel", "single", ("automodel_2",)),
    ("veomni", "veomni_2", ("single", "fsdp2_2", "veomni_2")),
    ("veomni", "fsdp2_2", ("veomni_2",)),
]


def layout(name: str) -> ParityLayout:
    return next(one for one in chosen([name]) if one.name == name)


@pytest.mark.parametrize(
    ("writer", "readers"), [pytest.param(writer, readers, marks=needing(name)) for name, writer, readers in MOVES]
)
def test_ckpt_06_a_run_goes_on_under_another_strategy_and_bit_for_bit_under_its_own(writer, readers, tmp_path: Path):
    undisturbed = written(layout(writer), tmp_path)
    for reader in readers:
        difference = relative_difference(undisturbed, gone_on(layout(reader), tmp_path))
        assert difference < 1e-5, reader
        assert (difference == 0.0) or reader != writer, "the same layout goes on bit for bit"


def test_a_table_has_a_row_for_each_writer():
    assert markdown({"a": {"a": 0.0, "b": 2e-7}, "b": {"a": 1e-6, "b": 0.0}}).splitlines()[2:] == [
        "| a | 0 | 2e-07 |",
        "| b | 1e-06 | 0 |",
    ]
