"""``benchmarks/layouts.py``: its rows against formulas worked out here."""

from __future__ import annotations

import hydra
import layouts
import pytest

from rlmodule import cli

P, LAYERS, H, KV = 7_615_616_512, 28, 3584, 512  # of Qwen2.5-7B
T = 4096
STATES = 2 * T * H  # bytes of the hidden states of a micro-batch

CASES = {
    "fsdp2": 0.0,
    "fsdp2 strategy.sp_size=2": 3 * LAYERS * 2 * T * (2 * H + 2 * KV) / 2,
    "fsdp2 strategy.tp_size=2": 6 * LAYERS * STATES,
    "fsdp2 strategy.pp_size=2": STATES,
    "fsdp2 strategy.pp_size=4 strategy.tp_size=2": 6 * LAYERS / 4 * STATES + 2 * STATES,
}


@pytest.mark.parametrize("layout", CASES)
def test_what_is_sent_of_activations_is_what_a_layer_needs(layout):
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        row = layouts.row_of("qwen2.5_7b", 8, layout, T)
    assert row.activations_per_micro_step == pytest.approx(CASES[layout])
    if layout == "fsdp2":
        assert (row.weights, row.moments) == (4 * P // 8, 8 * P // 8)


def test_every_layout_of_a_table_has_a_name_of_its_own():
    for _, words in layouts.MODELS.values():
        assert len({layouts._in_short(layout) for layout in words}) == len(words)
