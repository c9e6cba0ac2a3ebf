"""A scheduler's signal: every rank finishes the step, one whole checkpoint of it exists, resuming gives the same run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from rlmodule.checkpoint.state import STATE_FILE, newest_whole, verify
from rlmodule.core.errors import CheckpointError, Preempted
from strategies.parts import snapshot
from tests.callbacks.fits import SmallRun
from tests.helpers.ranks import run_on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

SAVING = {"metrics": {}, "checkpoint": {"keep": 9}}
IN_BACKGROUND = {"metrics": {}, "checkpoint": {"keep": 9, "async_save": True}}


class SignalDuringStep(L.Callback):
    """Rank 0 alone gets a SIGTERM while ``step`` runs."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if self.rank == 0 and module.counters.steps == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def steps_of(root: Path) -> dict[int, dict[str, float]]:
    records = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return {
        r["step"]: {k: v for k, v in r.items() if k.startswith(("actor/", "balance/shared_rows"))}
        for r in records
        if r.get("kind") == "step"
    }


def fit(run: SmallRun, world_size: int, signal_at: int | None = None, checkpoint: Path | None = None) -> list[str]:
    """What ended each rank; empty where it came to its end."""

    def rank_of(rank: int) -> str:
        extra = () if signal_at is None else (SignalDuringStep(signal_at, rank),)
        try:
            replace(run.on_rank(rank, world_size), extra=extra).fit(checkpoint)
        except Preempted as stopped:
            return str(stopped)
        return ""

    return run_on_ranks(world_size, rank_of)


@pytest.mark.parametrize(
    ("resumed_world", "saving", "shares_rows"),
    [(2, SAVING, False), (1, SAVING, False), (2, IN_BACKGROUND, False), (2, SAVING, True), (1, SAVING, True)],
)
def test_str_07_signal_to_one_rank_within_an_iteration(tmp_path, resumed_world, saving, shares_rows):
    """A checkpoint that is written in the background when the signal comes is finished first; rows may be shared."""
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    kind = {"shares_rows": shares_rows, "imitates": shares_rows}  # of demonstrations, none is skipped
    assert fit(SmallRun(undisturbed, SAVING, **kind), 2) == ["", ""]

    run = SmallRun(stopped, saving, **kind)
    endings = fit(run, 2, signal_at=3)
    assert all("asked to stop" in ending for ending in endings), "both ranks stop, though one was asked"
    folder, passed_over = newest_whole(stopped / "checkpoints")
    assert folder is not None and folder.name == "iteration_000001.step_00000003" and not passed_over
    assert verify(folder).entries["step"] == 3
    assert verify(folder.with_name("iteration_000001")).entries["step"] == 2

    assert fit(replace(run, resumed_step=3), resumed_world, checkpoint=folder / STATE_FILE) == [""] * resumed_world
    wanted, got = steps_of(undisturbed), steps_of(stopped)
    assert sorted(got) == sorted(wanted) == [1, 2, 3, 4], "no step is lost or repeated"
    shared = {step: values.pop("balance/shared_rows") for step, values in wanted.items()}
    assert (shared[3] > 0 and shared[4] > 0) == shares_rows, f"before the signal and after it: {shared}"
    for step, values in wanted.items():
        got[step].pop("balance/shared_rows")
        tolerance = 0 if resumed_world == 2 or step <= 3 else 1e-5
        assert got[step] == pytest.approx(values, rel=tolerance, abs=tolerance), step


def test_str_07_signal_in_the_last_step_of_an_iteration_saves_the_whole_iteration(tmp_path):
    run = SmallRun(tmp_path, SAVING)
    assert all("asked to stop" in ending for ending in fit(run, 2, signal_at=2))
    folder, _ = newest_whole(tmp_path / "checkpoints")
    assert folder is not None and folder.name == "iteration_000001"


def test_ckpt_01_a_half_written_checkpoint_of_several_ranks_is_passed_over(tmp_path):
    assert fit(SmallRun(tmp_path, SAVING), 2) == ["", ""]
    newest = tmp_path / "checkpoints" / "iteration_000002"
    shard = next((newest / "shards").glob("rank_1_*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-7])
    found, passed_over = newest_whole(tmp_path / "checkpoints")
    assert found is not None and found.name == "iteration_000001"
    assert len(passed_over) == 1 and shard.name in passed_over[0]


@pytest.mark.parametrize("saving", [SAVING, IN_BACKGROUND], ids=["at once", "in the background"])
def test_ckpt_03_a_disk_that_fills_up_on_one_rank_stops_all_and_spoils_nothing(tmp_path, saving):
    """The second rank cannot write its shards of the second of three checkpoints."""

    def rank_of(rank: int) -> str:
        write, calls = snapshot.write_shards, []

        def full(*args: Any) -> None:
            calls.append(1)
            if rank == 1 and len(calls) == 2:
                raise OSError(28, "No space left on device")
            write(*args)

        snapshot.write_shards = full
        try:
            SmallRun(tmp_path, saving, iterations=3).on_rank(rank, 2).fit()
        except CheckpointError as error:
            return str(error)
        return ""

    endings = run_on_ranks(2, rank_of)
    assert all("iteration_000002" in text and "No space left" in text for text in endings), endings
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["iteration_000001"]
    assert verify(tmp_path / "checkpoints" / "iteration_000001").entries["step"] == 2
