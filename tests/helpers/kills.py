"""Runs that are killed (-9, every rank at once) at a chosen call: the third fsync, the fifth step, the second rename."""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path
from typing import Any

import rlmodule.callbacks.checkpoint
import rlmodule.models.export
from rlmodule.checkpoint import state
from rlmodule.checkpoint.state import newest_whole
from rlmodule.experience.sources import RolloutSource
from rlmodule.module import RLModule
from rlmodule.records.metrics_log import RecordFile
from strategies.parts import snapshot
from tests.helpers.ranks import HERE, run_on_ranks, tell_before
from tests.helpers.runs import run_small

PATIENCE = 120  # seconds
# What is called -> where it is, and how often in an iteration, which has two steps, three records and one checkpoint.
TRAINING: dict[str, tuple[Any, str, int]] = {
    "rollout": (RolloutSource, "collect", 1),
    "step": (RLModule, "training_step", 2),
    "record": (RecordFile, "write", 3),
    "prune": (rlmodule.callbacks.checkpoint, "prune", 1),
}
WRITING: dict[str, tuple[Any, str, int]] = {
    "shard": (snapshot, "write_shards", 1),
    "finish": (state, "_finish", 1),
    "flush": (state, "_flush", 7),  # of every file and folder, before the whole gets its name
    "rename": (Path, "rename", 1),
}
ENDING: dict[str, tuple[Any, str, int]] = {"export": (rlmodule.models.export, "save_pretrained", 1)}
PLACES = TRAINING | WRITING | ENDING
ON_EVERY_RANK = ("shard", "step")


@dataclass(frozen=True)
class Moment:
    """Just before the ``count``-th call (from 1) of what ``place`` names on ``rank``; ``seconds`` from the start instead."""

    place: str = ""
    count: int = 0
    rank: int = 0
    seconds: float | None = None

    @property
    def is_in_a_write(self) -> bool:
        """Whether a checkpoint lies half written afterwards."""
        return self.place in WRITING


def drawn(seed: int, count: int, *, ranks: int = 1) -> list[Moment]:
    """Moments by chance within the first iteration of a start, the same for a seed; every other one in a write."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        place = draw.choice(sorted(WRITING if i % 2 else TRAINING))
        rank = draw.randrange(ranks) if place in ON_EVERY_RANK else 0
        made.append(Moment(place, draw.randint(1, PLACES[place][2]), rank))
    return made


def killed_run(
    folder: Path,
    world_size: int,
    moment: Moment | None,
    *overrides: str,
    start: ForkContext | ForkServerContext = HERE,
    before: Callable[[], None] | None = None,
) -> bool:
    """One start of a small run on ``world_size`` ranks; whether it was killed before it came to its end.

    ``before`` is called in the process that leads it.
    """
    saved, _ = newest_whole(folder / "run" / "checkpoints")
    if saved is not None:
        overrides = (*overrides, f"resume={folder / 'run'}")
    process = start.Process(target=_lead, args=(folder, world_size, moment, overrides, before))
    process.start()
    assert process.pid is not None
    if moment is not None and moment.seconds is not None:
        process.join(moment.seconds)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
    process.join(PATIENCE)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError("it hangs")
    assert process.exitcode in (0, -signal.SIGKILL), f"it ended with {process.exitcode}"
    return process.exitcode != 0


def _lead(
    folder: Path,
    world_size: int,
    moment: Moment | None,
    overrides: tuple[str, ...],
    before: Callable[[], None] | None,
) -> None:
    os.setpgrp()  # whoever kills the group kills all ranks at once
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    tempfile.tempdir = str(scratch)
    if before is not None:
        before()
    run_ranks = partial(_run, folder=folder, world_size=world_size, moment=moment, overrides=overrides)
    if world_size == 1:
        tell_before(PATIENCE)
        run_ranks(0)
    else:
        run_on_ranks(world_size, run_ranks)


def _run(rank: int, folder: Path, world_size: int, moment: Moment | None, overrides: tuple[str, ...]) -> None:
    if moment is not None and moment.place and rank == moment.rank:
        owner, name, _ = PLACES[moment.place]
        setattr(owner, name, _deadly(getattr(owner, name), moment.count))
    run_dir = folder / "run"
    run_small(run_dir, f"trainer.devices={world_size}", *overrides)


def _deadly(original: Callable[..., Any], count: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            os.killpg(0, signal.SIGKILL)
            threading.Event().wait()  # a signal to oneself may arrive a moment later
        return original(*args, **kwargs)

    return counted
