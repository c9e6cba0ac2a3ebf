"""Issue 10, point 15: one rank fails while a checkpoint is taken, written or read. Every rank hears of it, none waits.

A rank that hangs would be killed after two minutes, and fail the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rlmodule.checkpoint import state
from rlmodule.checkpoint.state import STATE_FILE, folder_of, newest_whole
from rlmodule.core.errors import CheckpointError, TrainingError
from rlmodule.datamodule import RLDataModule
from rlmodule.experience.replay import ReplayMemory
from strategies.parts import saved_state, shards, snapshot
from strategies.parts.snapshot import StateFiles
from strategies.parts.strategy_mixin import local
from tests.callbacks.fits import SmallRun
from tests.helpers.ranks import run_on_ranks
from tests.strategies.test_checkpoint_portable import RUN, STEPS, saving

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

SAVING = {"metrics": {}, "checkpoint": {"keep": 9}}
IN_BACKGROUND = {"metrics": {}, "checkpoint": {"keep": 9, "async_save": True}}

# What fails -> (where it is, its name, the rank on which it fails). All happen once per checkpoint and rank.
TAKING: dict[str, tuple[Any, str, int]] = {
    "taking weights": (saved_state, "first_not_finite", 1),
    "planning its pieces": (saved_state, "plan_of_rank", 1),
    "sharing out": (snapshot, "share_out", 0),
    "its unfinished rows": (RLDataModule, "partial_state", 1),
    "its replay memory": (ReplayMemory, "state", 1),
    "Lightning's state": (StateFiles, "of", 0),
}
WRITING: dict[str, tuple[Any, str, int]] = {
    "its shards": (snapshot, "write_shards", 1),
    "the index": (snapshot, "write_index", 0),
    "the state": (StateFiles, "write", 0),
    "the manifest": (state, "_finish", 0),
}
FAILURES = (
    MemoryError("drill"),
    RuntimeError("drill"),
    OSError(28, "drill"),
    AssertionError("drill"),
    KeyError("drill"),
)


def fail(place: tuple[Any, str, int], rank: int, error: Exception, nth: int) -> None:
    """From now on, in this forked rank, the ``nth`` call of what ``place`` names fails if it is the rank's turn."""
    owner, name, failing_rank = place
    inner: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def drilled(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if rank == failing_rank and len(calls) == nth:
            raise error
        return inner(*args, **kwargs)

    setattr(owner, name, drilled)


def endings(
    place: tuple[Any, str, int], error: Exception, run: SmallRun, checkpoint: Path | None = None, nth: int = 2
) -> list[str]:
    """What ended each of two ranks."""

    def rank_of(rank: int) -> str:
        fail(place, rank, error, nth)
        try:
            run.on_rank(rank, 2).fit(checkpoint)
        except CheckpointError as caught:
            return str(caught)
        return ""

    return run_on_ranks(2, rank_of)


@pytest.mark.parametrize("saving", [SAVING, IN_BACKGROUND], ids=["at once", "in the background"])
@pytest.mark.parametrize("what", [*TAKING, *WRITING])
def test_point_15_a_rank_that_cannot_save_ends_every_rank_and_spoils_nothing(tmp_path, what, saving):
    place = {**TAKING, **WRITING}[what]
    error = FAILURES[[*TAKING, *WRITING].index(what) % len(FAILURES)]
    texts = endings(place, error, SmallRun(tmp_path, saving, iterations=3, loggers=()))
    assert len(set(texts)) == 1, texts
    assert f"rank {place[2]}: {type(error).__name__}" in texts[0]
    assert "drill" in texts[0]
    assert "could not be written" in texts[0] or "could not be taken" in texts[0]
    assert newest_whole(tmp_path / "checkpoints") == (folder_of(tmp_path / "checkpoints", 1), [])
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["iteration_000001"], (
        "nothing half written is left"
    )


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp", "deepspeed"])
def test_point_15_under_every_kind_of_sharding(tmp_path, backend):
    """Where ranks hold pieces of one tensor."""

    def rank_of(rank: int) -> str:
        fail(WRITING["its shards"], rank, MemoryError("drill"), 2)
        try:
            saving(tmp_path, RUN.with_options(backend)).fit(2, rank)
        except CheckpointError as caught:
            return str(caught)
        return ""

    texts = run_on_ranks(2, rank_of)
    assert len(set(texts)) == 1 and "rank 1: MemoryError: drill" in texts[0], texts
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["iteration_000001"]


READING: dict[str, tuple[Any, str, int]] = {
    "the state": (StateFiles, "read", 1),
    "the index": (saved_state, "read_index", 1),
    "its shards": (saved_state, "read_shards", 0),
    "a file": (shards, "safe_open", 1),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The run directory of two ranks that trained for one iteration."""
    root = tmp_path_factory.mktemp("written")
    run = SmallRun(root, SAVING, iterations=1, loggers=())
    run_on_ranks(2, lambda rank: bool(run.on_rank(rank, 2).fit()))
    return root


@pytest.mark.parametrize("what", READING)
def test_point_15_a_rank_that_cannot_read_ends_every_rank(written, tmp_path, what):
    checkpoint = folder_of(written / "checkpoints", 1) / STATE_FILE
    run = replace(SmallRun(tmp_path, SAVING, resumed_step=2, loggers=()))
    texts = endings(READING[what], OSError(5, "drill"), run, checkpoint, nth=1)
    assert len(set(texts)) == 1, texts
    assert "drill" in texts[0]


class SpoilShard(L.Callback):
    """The second rank's piece of a weight is NaN after the last step."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if module.counters.steps == STEPS and trainer.global_rank == 1:
            pieces = (local(parameter) for _, parameter in trainer.strategy.named_parameters("policy"))
            with torch.no_grad():
                next(piece for piece in pieces if piece.numel()).view(-1)[0] = float("nan")


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp"])
def test_point_16_a_piece_that_is_not_finite_on_one_rank_is_known_to_all(tmp_path, backend):
    def rank_of(rank: int) -> str:
        run = saving(tmp_path, replace(RUN.with_options(backend), epochs=1))
        try:
            replace(run, callbacks=(SpoilShard(), *run.callbacks)).fit(2, rank)
        except TrainingError as caught:
            return str(caught)
        return ""

    texts = run_on_ranks(2, rank_of)
    assert len(set(texts)) == 1 and "is not finite, so this state is not saved. Start anew" in texts[0], texts
    assert not (tmp_path / "checkpoints").exists()
