"""Saves what resumes the run, at the end of an iteration: model, optimizer, schedule, random state, place in the data.

Leaves out how a folder is written safely (``checkpoint/state.py``).
"""

from __future__ import annotations

import random
import warnings
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.run_context import RunContext, Running
from rlmodule.checkpoint.background import in_background
from rlmodule.checkpoint.state import STATE_FILE, Quality, folder_of, prune, write_folder_together
from rlmodule.core.config import at_least, one_of
from rlmodule.core.contract import SaveLater, Snapshot
from rlmodule.core.errors import CheckpointError, did_you_mean

# What ranks hold of samples, in the state of a run: rows of an iteration under way, and responses to train on again.
UNFINISHED, REPLAY = "unfinished", "replay"
AUTO = "auto"


@CALLBACKS.register
@dataclass(frozen=True)
class CheckpointSettings:
    """When to save, and which to keep."""

    every_n_iterations: int = 1  # the last iteration is always saved
    keep: int = 2  # newest checkpoints that stay on disk
    best_metric: str | None = AUTO  # as in metrics.jsonl, or auto; the best one by it stays too; null for none
    best_mode: str = "max"  # max or min: which values of best_metric are good
    async_save: bool = False  # train on while it is written, from a copy in host memory; one write at a time

    def __post_init__(self) -> None:
        at_least("every_n_iterations", self.every_n_iterations, 1)
        at_least("keep", self.keep, 1)
        one_of("best_mode", self.best_mode, ("max", "min"))

    def connect(self, context: RunContext) -> SaveCheckpoints:
        """The callback for one run."""
        return SaveCheckpoints(self, context)


class SaveCheckpoints(Checkpoint):
    """Lightning runs callbacks of this base class last, so what the others keep is up to date when it is saved.

    The last iteration is saved at the end of training, after validation and export: a run that is killed before it has
    exported goes on from the checkpoint before, instead of finding nothing left to do.
    """

    def __init__(self, settings: CheckpointSettings, context: RunContext) -> None:
        super().__init__()
        self.settings = settings
        self.context = context
        self.root = context.run_dir / "checkpoints"
        self._pending: tuple[Path, Future[str | None]] | None = None
        self._doubted = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From now on a signal means: save, then stop."""
        Running.of(trainer).module.stop_requests.listen()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Signals mean what they meant before."""
        Running.of(trainer).module.stop_requests.let_go()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Asked to stop within an iteration: save what is left of it too, and end the run."""
        running = Running.of(trainer)
        if not self._all_must_stop(running) or running.data.unfinished() is None:
            return
        folder = folder_of(self.root, running.data.next_iteration - 1, running.step)
        self._save(running, folder)
        running.module.stop_requests.stop(folder)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save where it is due."""
        running = Running.of(trainer)
        self._settle_if_written(running)
        done = running.data.next_iteration
        must_stop = self._all_must_stop(running)
        if done >= self.context.max_iterations or (done % self.settings.every_n_iterations and not must_stop):
            return
        folder = folder_of(self.root, done)
        self._save(running, folder, run_goes_on=not must_stop)
        if must_stop:
            running.module.stop_requests.stop(folder)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last iteration."""
        running = Running.of(trainer)
        self._save(running, folder_of(self.root, running.data.next_iteration))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """A checkpoint under way is worth waiting for, but not where somebody wants to leave at once."""
        if self._pending is None or isinstance(exception, KeyboardInterrupt):
            return
        try:
            self._settle()
        except (CheckpointError, RuntimeError) as error:  # of a rank that is gone
            warnings.warn(str(error), stacklevel=2)

    def _all_must_stop(self, running: Running) -> bool:
        """Data ranks know from the step's metrics; where a row or a matrix is shared, its ranks ask each other."""
        layout, must_stop = running.strategy.layout, running.module.must_stop
        if layout.dp_size == layout.world_size:
            return must_stop
        return running.strategy.agree("stop" if must_stop else None) is not None

    def _save(self, running: Running, folder: Path, *, run_goes_on: bool = False) -> None:
        self._settle()
        trainer = running.trainer
        later = SaveLater(copied=self.settings.async_save and run_goes_on)
        trainer.save_checkpoint(STATE_FILE, storage_options=later)
        assert later.snapshot is not None, "the strategy takes one when asked"
        write = partial(self._write, folder, later.snapshot, self._facts(running), trainer.is_global_zero)
        if later.copied:
            self._pending = folder, in_background(write)
        else:
            stop_on(write(), folder)

    def _facts(self, running: Running) -> dict[str, Any]:
        """For the manifest."""
        return {
            "iteration": running.data.next_iteration,
            "step": running.step,
            "layout": running.strategy.layout.sizes,
            "config": dict(self.context.hparams),
            "best": self._quality(running),
        }

    def _write(self, folder: Path, snapshot: Snapshot, facts: dict[str, Any], is_first: bool) -> str | None:
        """What went wrong, the same on every process."""
        failure = write_folder_together(
            folder, lambda aside: snapshot.write(aside / STATE_FILE), facts, agree=snapshot.agree, is_first=is_first
        )
        if failure is None and is_first:
            prune(self.root, self.settings.keep, folder)
        return failure

    def _settle(self) -> None:
        """Wait for the write that is under way, if there is one.

        Raises:
            CheckpointError: on every process, when it failed on any.
        """
        if self._pending is None:
            return
        (folder, outcome), self._pending = self._pending, None
        stop_on(outcome.result(), folder)

    def _settle_if_written(self, running: Running) -> None:
        """A write that has failed ends the run at the end of the iteration, not only when the next save is due."""
        if self._pending is None:
            return
        _, outcome = self._pending
        if running.strategy.agree(None if outcome.done() else "busy") is None:
            self._settle()

    def _quality(self, running: Running) -> dict[str, Any] | None:
        """For the manifest: what ranks this checkpoint among the others, see ``best_of``."""
        metric = self.settings.best_metric
        if metric == AUTO:
            metric = next((examination.accuracy for examination in running.data.examinations), None)
        if metric is None:
            return None
        value = self.context.journal.value_at(running.step, metric)
        if value is None and self.context.is_first:
            self._doubt(metric)
        return asdict(Quality(metric, self.settings.best_mode, value))

    def _doubt(self, metric: str) -> None:
        """Say once that a metric is not among those logged so far, where it should have been."""
        records = self.context.journal.records
        known = {name for record in records for name in record.metrics}
        is_late = metric.startswith("val/") and not any(record.kind == "validation" for record in records)
        if metric not in known and not is_late and not self._doubted:
            self._doubted = True
            warnings.warn(
                f"callbacks.checkpoint.best_metric={metric}: no such metric is logged, so no checkpoint is the best. "
                + did_you_mean(metric, known),
                stacklevel=2,
            )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep every token rank's random state beside the model, and what samples it holds."""
        running = Running.of(trainer)
        checkpoint["random_states"] = running.strategy.collectives.gather_objects(random_state())
        for name, held in ((UNFINISHED, running.data.unfinished()), (REPLAY, running.data.replay.state())):
            if held is not None:
                parcel = torch.frombuffer(bytearray(held), dtype=torch.uint8)  # torch.load reads tensors, not objects
                checkpoint[name] = running.strategy.collectives.gather_objects(parcel)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Bring back the random state of this token rank, where the checkpoint knows one."""
        running = Running.of(trainer)
        running.data.take_up(_parcels(checkpoint, UNFINISHED))
        running.data.replay.load(_parcels(checkpoint, REPLAY), running.strategy.layout)
        states = checkpoint["random_states"]
        rank = running.strategy.layout.token_rank
        if rank < len(states):
            set_random_state(states[rank])


def _parcels(checkpoint: dict[str, Any], name: str) -> list[bytes]:
    return [parcel.numpy().tobytes() for parcel in checkpoint.get(name, ())]


def stop_on(failure: str | None, folder: Path) -> None:
    """A checkpoint that could not be written ends the run.

    Raises:
        CheckpointError: there is a failure.
    """
    if failure is not None:
        raise CheckpointError(
            f"{folder}: the checkpoint could not be written ({failure}). Earlier checkpoints are whole; "
            "free some space or change output_root, then go on with resume=auto"
        )


def random_state() -> dict[str, Any]:
    """State of torch's and Python's generators, of plain types only."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Inverse of ``random_state``."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
