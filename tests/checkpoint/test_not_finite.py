"""Issue 10, point 16: a state with weights that are not finite is no checkpoint, whichever rank holds them."""

from __future__ import annotations

import json
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rlmodule.checkpoint.state import STATE_FILE, folder_of, newest_whole
from rlmodule.core.errors import CheckpointError, TrainingError
from rlmodule.records.metrics_log import read_records
from strategies.parts.saved_state import first_not_finite
from tests.callbacks.fits import SmallRun
from tests.helpers.ranks import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

SAVING = {"metrics": {}, "report": {"curves": False}, "checkpoint": {"keep": 9}}


def name_and_weight(module: Any) -> tuple[str, torch.nn.Parameter]:
    return list(module.models["policy"].named_parameters())[1]


class Spoil(L.Callback):
    """One weight is not finite when iteration ``at`` is saved; it is put back before the next one unless it ``stays``."""

    def __init__(self, at: int, *, value: float = math.nan, stays: bool = False) -> None:
        self.at, self.value, self.stays = at, value, stays
        self.before: torch.Tensor | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if module.counters.steps == 2 * self.at:
            weight = name_and_weight(module)[1]
            self.before = weight.detach().clone()
            with torch.no_grad():
                weight.view(-1)[3] = self.value

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.before is not None and not self.stays:
            with torch.no_grad():
                name_and_weight(module)[1].copy_(self.before)


def fit(
    rank: int, run_dir: Path, world_size: int, at: int, iterations: int, spoiled_rank: int, **how: Any
) -> tuple[str, list[str]]:
    """What ended the rank, and what it was warned of."""
    extra = (Spoil(at, **how),) if rank == spoiled_rank else ()
    run = SmallRun(run_dir, SAVING, iterations=iterations, extra=extra, loggers=()).on_rank(rank, world_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.fit()
        except TrainingError as error:
            return str(error), []
    return "", [str(w.message) for w in caught if "is not finite" in str(w.message)]


def saved(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "spoiled_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_point_16_it_is_not_saved_but_counted_and_the_next_one_is_saved_again(
    tmp_path, world_size, spoiled_rank, value
):
    endings = run_on_ranks(
        world_size,
        partial(
            fit, run_dir=tmp_path, world_size=world_size, at=2, iterations=3, spoiled_rank=spoiled_rank, value=value
        ),
    )
    assert [text for text, _ in endings] == [""] * world_size
    [[said], *silent] = [heard for _, heard in endings]
    assert all(heard == [] for heard in silent), "the first rank speaks for all"
    assert said.startswith("step 4: policy.lm.")
    assert "is not finite, so this state is not saved. Go on from" in said
    assert "iteration_000001 with a lower optimizer.lr" in said
    assert saved(tmp_path) == ["iteration_000001", "iteration_000003"]
    counted = [
        r.metrics.get("checkpoint/not_finite")
        for r in read_records(tmp_path / "metrics.jsonl")
        if r.kind == "iteration"
    ]
    assert counted == [None, None, 1.0], "with the next iteration, as it is saved after the numbers are written"
    assert json.loads((tmp_path / "summary.json").read_text())["checkpoint_not_finite"] == 1


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "spoiled_rank"), [(1, 0), (2, 1)])
def test_point_16_a_run_that_would_end_with_it_ends_with_an_error_on_every_rank(tmp_path, world_size, spoiled_rank):
    endings = run_on_ranks(
        world_size,
        partial(
            fit, run_dir=tmp_path, world_size=world_size, at=2, iterations=2, spoiled_rank=spoiled_rank, stays=True
        ),
    )
    for text, _ in endings:
        assert text.startswith("step 4: policy.lm.")
    assert newest_whole(tmp_path / "checkpoints") == (folder_of(tmp_path / "checkpoints", 1), [])


def test_point_16_a_policy_that_is_not_finite_is_not_exported(tmp_path):
    run = SmallRun(tmp_path, {**SAVING, "export": {}}, extra=(Spoil(2, stays=True),), loggers=())
    with pytest.raises(TrainingError, match=r"the policy is not exported: model\.\S+ is not finite\. Go on from"):
        run.fit()
    assert not (tmp_path / "policy").exists()


def test_point_16_a_checkpoint_that_holds_one_all_the_same_is_not_taken(tmp_path, monkeypatch):
    """One that a tool has made, or a disk."""
    monkeypatch.setattr("strategies.parts.saved_state.first_not_finite", lambda parts: None)
    SmallRun(tmp_path, SAVING, extra=(Spoil(1),), loggers=()).fit()
    monkeypatch.undo()
    folder = folder_of(tmp_path / "checkpoints", 1)
    with pytest.raises(CheckpointError, match="is not finite") as caught:
        SmallRun(tmp_path, SAVING, resumed_step=2, loggers=()).fit(folder / STATE_FILE)
    assert str(caught.value).startswith(str(folder))


def test_moments_may_be_infinite_but_not_nan():
    """An infinite second moment is what a huge gradient leaves; its weight stands still from then on."""
    parts = {"w": torch.zeros(2), "w@exp_avg": torch.zeros(2), "w@exp_avg_sq": torch.tensor([1.0, math.inf])}
    assert first_not_finite(parts) is None
    assert first_not_finite({**parts, "w@exp_avg": torch.tensor([0.0, math.nan])}) == "w@exp_avg"
    assert first_not_finite({"w": torch.tensor([-math.inf])}) == "w"
    assert first_not_finite({"ids": torch.tensor([1])}) is None
