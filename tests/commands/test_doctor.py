"""``command=doctor`` measures what it costs to share a row, and names the key that takes the number."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlmodule.commands.doctor import FAR_KEY, KEY, Doctor, keys_to_set
from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.run.sharing_cost import SharingCost, measure_sharing
from tests.end_to_end.commands import forked
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import SMALL, invocation, small_run

SHARED = ("trainer.devices=2", "batching.max_sp_size=2")


def test_the_overhead_is_the_planner_s() -> None:
    """A width of w at 1 + c takes (1 + c) / w of the row's time: what ``Exchange.share`` charges for it."""
    cost = SharingCost(100, fixed=1.0, seconds={1: 9.0, 2: 1.0 + 8 * 1.25 / 2, 4: 1.0 + 8 * 1.5 / 4})
    assert cost.overheads == pytest.approx({2: 0.25, 4: 0.5})


def test_each_key_gets_the_highest_price_of_its_widths_and_nothing_below_zero() -> None:
    cost = SharingCost(100, 0.0, {1: 8.0, 2: 4.4, 4: 2.1, 8: 1.5})
    assert keys_to_set(cost, node_size=4) == {KEY: 0.1, FAR_KEY: 0.5}
    assert keys_to_set(cost, node_size=8) == {KEY: 0.5}
    assert keys_to_set(SharingCost(100, 0.0, {1: 8.0, 2: 3.9}), node_size=2) == {KEY: 0.0}


def test_a_row_that_cannot_be_told_from_two_tokens_is_said() -> None:
    with pytest.raises(TrainingError, match=r"8 tokens took no longer .* command.row_tokens"):
        _ = SharingCost(8, 0.5, {1: 0.4, 2: 0.4}).overheads


@pytest.mark.parametrize(
    ("words", "key"),
    [(("trainer.devices=2",), "batching.max_sp_size"), ((*SHARED, "algorithm=rm"), "model")],
)
def test_a_run_that_shares_no_rows_of_a_policy_is_refused(tmp_path: Path, words: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Doctor()(invocation(tmp_path, "strategy=ddp", *words))
    assert refused.value.key == key


@pytest.mark.parametrize(("key", "value"), [("row_tokens", 7), ("rounds", 0)])
def test_sizes_that_measure_nothing_are_refused(key: str, value: int) -> None:
    with pytest.raises(ConfigError) as refused:
        Doctor(**{key: value})
    assert refused.value.key == key


def measured(rank: int, folder: Path, strategy: str, delay: float) -> SharingCost:
    """With an exchange that takes ``delay`` CPU seconds longer."""
    original = dist.all_to_all_single

    def slower(*args: Any, **kwargs: Any) -> Any:
        end = time.process_time() + delay
        while time.process_time() < end:
            pass
        return original(*args, **kwargs)

    dist.all_to_all_single = slower
    return measure_sharing(small_run(folder, *SHARED, f"strategy={strategy}"), row_tokens=96, rounds=3)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_slow_exchange_is_seen_and_nothing_else(tmp_path: Path, strategy: str) -> None:
    delay = 0.05
    first, second = run_on_ranks(2, partial(measured, folder=tmp_path, strategy=strategy, delay=delay))
    assert first == second, "every rank knows the same numbers"
    assert first.tokens == 96 and sorted(first.seconds) == [1, 2]
    exchanges = (first.seconds[2] - first.seconds[1]) / delay
    assert exchanges > 1.5, "of forward and of backward"
    assert max(first.fixed, first.seconds[1]) < delay, "a row of one's own is not exchanged"


@pytest.mark.ranks
def test_it_prints_what_to_set_and_leaves_no_policy(tmp_path: Path) -> None:
    words = ("command.row_tokens=256", "command.rounds=3", "run_dir=run", "strategy=ddp")
    done = forked("doctor", *SMALL, *SHARED, *words, cwd=tmp_path)
    assert done.code == 0, done.text
    told = json.loads((tmp_path / "run" / "doctor.json").read_text())
    assert f"{KEY}={told['keys'][KEY]} (now 0.03)" in done.text
    assert "256 tokens, forward and backward, 2 cpu processes, strategy=ddp" in done.text
    assert told["tokens"] == 256 and set(told["seconds"]) == {"1", "2"}
    assert not list((tmp_path / "run").glob("policy*")) and not (tmp_path / "run" / "metrics.jsonl").exists()
