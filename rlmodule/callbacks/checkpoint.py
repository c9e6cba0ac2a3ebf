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
from rlmodule.callbacks.parts.context import RunContext, RunState
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
class CheckpointConfig:
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

    def __init__(self, config: CheckpointConfig, context: RunContext) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.root = context.run_dir / "checkpoints"
        self._pending: tuple[Path, Future[str | None]] | None = None
        self._doubted = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From now on a signal means: save, then stop."""
        RunState.of(trainer).module.preemption.install()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What is trained from here on is lost unless it is saved first."""
        RunState.of(trainer).module.preemption.at_rest = None

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Signals mean what they meant before."""
        RunState.of(trainer).module.preemption.uninstall()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Asked to stop within an iteration: save what is left of it too, and end the run."""
        run_state = RunState.of(trainer)
        if not self._all_must_stop(run_state) or run_state.data.partial_state() is None:
            return
        folder = folder_of(self.root, run_state.data.next_iteration - 1, run_state.step)
        self._save(run_state, folder)
        run_state.module.preemption.stop(folder)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save where it is due."""
        run_state = RunState.of(trainer)
        self._settle_if_written(run_state)
        done = run_state.data.next_iteration
        must_stop = self._all_must_stop(run_state)
        if done >= self.context.max_iterations or (done % self.config.every_n_iterations and not must_stop):
            return
        folder = folder_of(self.root, done)
        self._save(run_state, folder, run_goes_on=not must_stop)
        if must_stop:
            run_state.module.preemption.stop(folder)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last iteration."""
        run_state = RunState.of(trainer)
        self._save(run_state, folder_of(self.root, run_state.data.next_iteration))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """A checkpoint under way is worth waiting for, but not where somebody wants to leave at once."""
        if self._pending is None or isinstance(exception, KeyboardInterrupt):
            return
        try:
            self._settle()
        except (CheckpointError, RuntimeError) as error:  # of a rank that is gone
            warnings.warn(str(error), stacklevel=2)

    def _all_must_stop(self, run_state: RunState) -> bool:
        """Data ranks know from the step's metrics; where a row or a matrix is shared, its ranks ask each other."""
        layout, must_stop = run_state.strategy.layout, run_state.module.must_stop
        if layout.dp_size == layout.world_size:
            return must_stop
        return run_state.strategy.gather_first_error("stop" if must_stop else None) is not None

    def _save(self, run_state: RunState, folder: Path, *, run_goes_on: bool = False) -> None:
        self._settle()
        trainer = run_state.trainer
        later = SaveLater(copied=self.config.async_save and run_goes_on)
        trainer.save_checkpoint(STATE_FILE, storage_options=later)
        assert later.snapshot is not None, "the strategy takes one when asked"
        write = partial(self._write, folder, later.snapshot, self._facts(run_state), trainer.is_global_zero)
        if later.copied:
            self._pending = folder, in_background(write)
        else:
            stop_on(write(), folder)
            if run_goes_on:  # until the next step trains
                run_state.module.preemption.at_rest = f"its state is saved in {folder}; go on with resume=auto"

    def _facts(self, run_state: RunState) -> dict[str, Any]:
        """For the manifest."""
        return {
            "iteration": run_state.data.next_iteration,
            "step": run_state.step,
            "layout": run_state.strategy.layout.sizes,
            "config": dict(self.context.hparams),
            "best": self._quality(run_state),
        }

    def _write(self, folder: Path, snapshot: Snapshot, entries: dict[str, Any], is_rank_zero: bool) -> str | None:
        """What went wrong, the same on every process."""
        failure = write_folder_together(
            folder,
            lambda aside: snapshot.write(aside / STATE_FILE),
            entries,
            gather_first_error=snapshot.gather_first_error,
            is_rank_zero=is_rank_zero,
        )
        if failure is None and is_rank_zero:
            prune(self.root, self.config.keep, folder)
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

    def _settle_if_written(self, run_state: RunState) -> None:
        """A write that has failed ends the run at the end of the iteration, not only when the next save is due."""
        if self._pending is None:
            return
        _, outcome = self._pending
        if run_state.strategy.gather_first_error(None if outcome.done() else "busy") is None:
            self._settle()

    def _quality(self, run_state: RunState) -> dict[str, Any] | None:
        """For the manifest: what ranks this checkpoint among the others, see ``best_of``."""
        metric = self.config.best_metric
        if metric == AUTO:
            metric = next((evaluator.accuracy for evaluator in run_state.data.evaluators), None)
        if metric is None:
            return None
        value = self.context.metrics_log.value_at(run_state.step, metric)
        if value is None and self.context.is_rank_zero:
            self._warn_unknown_metric(metric)
        return asdict(Quality(metric, self.config.best_mode, value))

    def _warn_unknown_metric(self, metric: str) -> None:
        """Say once that a metric is not among those logged so far, where it should have been."""
        records = self.context.metrics_log.records
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
        run_state = RunState.of(trainer)
        checkpoint["random_states"] = run_state.strategy.collectives.gather_objects(random_state())
        for name, held in ((UNFINISHED, run_state.data.partial_state()), (REPLAY, run_state.data.replay.state())):
            if held is not None:
                parcel = torch.frombuffer(bytearray(held), dtype=torch.uint8)  # torch.load reads tensors, not objects
                checkpoint[name] = run_state.strategy.collectives.gather_objects(parcel)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Bring back the random state of this token rank, where the checkpoint knows one."""
        run_state = RunState.of(trainer)
        run_state.data.load_partial_state(_payloads(checkpoint, UNFINISHED))
        run_state.data.replay.load(_payloads(checkpoint, REPLAY), run_state.strategy.layout)
        states = checkpoint["random_states"]
        rank = run_state.strategy.layout.dp_sp_rank
        if rank < len(states):
            set_random_state(states[rank])


def _payloads(checkpoint: dict[str, Any], name: str) -> list[bytes]:
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
