"""Saves what resumes the run, at the end of an iteration: model, optimizer, schedule, random state, place in the data.

A state with weights that are NaN or infinite is never saved. Leaves out how a folder is written safely
(``checkpoint/state.py``).
"""

from __future__ import annotations

import random
import warnings
from concurrent.futures import Future
from contextlib import suppress
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
from rlmodule.checkpoint.samples import PlainState
from rlmodule.checkpoint.state import (
    STATE_FILE,
    Quality,
    folder_of,
    oldest_first,
    prune,
    write_folder,
)
from rlmodule.core.config import at_least, one_of
from rlmodule.core.contract import SaveLater, Snapshot
from rlmodule.core.devices import detect_device
from rlmodule.core.errors import CheckpointError, EnginesGoneError, TrainingError, did_you_mean, in_one_line
from rlmodule.core.renamed import EARLIER_METRICS

# In the state of a run: what all ranks know of an unfinished iteration, and what each rank holds of its own.
UNFINISHED, RANKS = "unfinished", "ranks"
AUTO = "auto"
NOT_FINITE = "checkpoint/not_finite"  # states that were not saved since a weight was NaN or infinite


@CALLBACKS.register
@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and which to keep."""

    every_n_iterations: int = 1  # the last iteration is always saved
    keep: int = 2  # newest checkpoints that stay on disk
    best_metric: str | None = AUTO  # as in metrics.jsonl, or auto; the best one by it stays too; null for none
    best_mode: str = "max"  # max or min: which values of best_metric are good; auto knows
    async_save: bool = False  # train on while it is written, from a copy in host memory; one write at a time
    compare_copies: bool = True  # end the run when processes that hold the same weight differ in it

    def __post_init__(self) -> None:
        at_least("every_n_iterations", self.every_n_iterations, 1)
        at_least("keep", self.keep, 1)
        one_of("best_mode", self.best_mode, ("max", "min"))

    def connect(self, context: RunContext) -> SaveCheckpoints:
        return SaveCheckpoints(self, context)


class SaveCheckpoints(Checkpoint):
    """Lightning runs callbacks of this base class last, so the state of the others is up to date when it is saved.

    The last iteration is saved at the end of training, after validation and export: a run that is killed before it has
    exported goes on from the checkpoint before, instead of finding nothing left to do.

    Args:
        config: when to save, and what to keep.
        context: names the directory and holds the metrics that rank checkpoints.
    """

    def __init__(self, config: CheckpointConfig, context: RunContext) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.root = context.run_dir / "checkpoints"
        self._pending: tuple[Path, Future[str | None]] | None = None
        self._warned_of_metric = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From now on a signal means: save, then stop."""
        RunState.of(trainer).module.preemption.install()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What is trained from here on is lost unless it is saved first."""
        RunState.of(trainer).module.preemption.at_rest = None

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        RunState.of(trainer).module.preemption.uninstall()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        run_state = RunState.of(trainer)
        if not self._all_must_stop(run_state) or run_state.data.partial_state() is None:
            return
        folder = folder_of(self.root, run_state.data.next_iteration - 1, run_state.step)
        self._save(run_state, folder)
        run_state.module.preemption.stop(folder)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
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
        run_state = RunState.of(trainer)
        self._save(run_state, folder_of(self.root, run_state.data.next_iteration))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        run_state = RunState.of(trainer)
        if isinstance(exception, EnginesGoneError) and run_state.data.next_iteration:  # every rank has this error
            folder = folder_of(self.root, run_state.data.next_iteration)
            if not folder.exists():
                self._save(run_state, folder)
            if trainer.is_global_zero:
                print(f"what was trained is saved in {folder}")
            return
        if self._pending is None or isinstance(exception, KeyboardInterrupt):  # Ctrl-C does not wait for a write
            return
        try:
            self._settle()
        except (CheckpointError, RuntimeError) as error:  # of a rank that is gone
            warnings.warn(str(error), stacklevel=2)

    def _all_must_stop(self, run_state: RunState) -> bool:
        """Whether some rank was asked to stop. All data ranks know from the step's metrics; others are asked here."""
        layout, must_stop = run_state.strategy.layout, run_state.module.must_stop
        if layout.dp_size == layout.world_size:
            return must_stop
        return run_state.strategy.gather_first_error("stop" if must_stop else None) is not None

    def _save(self, run_state: RunState, folder: Path, *, run_goes_on: bool = False) -> None:
        """Save, at once or in the background.

        Raises:
            CheckpointError: on every process, when it could not be written on any.
            TrainingError: on every process, when a weight is not finite and the run ends here, or when two processes
                hold unequal copies of one.
        """
        self._settle()
        trainer = run_state.trainer
        later = SaveLater(copied=self.config.async_save and run_goes_on)
        trainer.save_checkpoint(STATE_FILE, storage_options=later)
        assert later.snapshot is not None, "the strategy takes one when asked"
        stop_on(later.snapshot.failure, folder)
        if later.snapshot.not_finite is not None:
            self._refuse(later.snapshot.not_finite, run_state, run_goes_on=run_goes_on)
            return
        if later.snapshot.differing is not None and self.config.compare_copies:
            raise TrainingError(self._words_for_differing(later.snapshot.differing, run_state))
        write = partial(self._write, folder, later.snapshot, self._entries(run_state), trainer.is_global_zero)
        if later.copied:
            self._pending = folder, in_background(write)
        else:
            stop_on(write(), folder)
            if run_goes_on:  # until the next step trains
                run_state.module.preemption.at_rest = f"its state is saved in {folder}; go on with resume=auto"

    def _refuse(self, name: str, run_state: RunState, *, run_goes_on: bool) -> None:
        """Save nothing, count it, and warn; an error where the run ends here."""
        self.context.metrics_log.count(NOT_FINITE)
        text = f"step {run_state.step}: {name} is not finite, so this state is not saved"
        saved = oldest_first(self.root)
        remedy = (
            f"Go on from {saved[-1]} with a lower optimizer.lr" if saved else "Start anew with a lower optimizer.lr"
        )
        if not run_goes_on:
            raise TrainingError(f"{text}. {remedy}")
        if self.context.is_rank_zero:
            warnings.warn(f"{text}. {remedy}", stacklevel=2)

    def _words_for_differing(self, differing: str, run_state: RunState) -> str:
        saved = oldest_first(self.root)
        return (
            f"step {run_state.step}: {differing}, though both hold the same part of the model. A device that computes "
            "wrongly does that, and code that is not the same on every process. This state is not saved. "
            + (f"Go on from {saved[-1]}" if saved else "Start anew")
            + " on other devices; callbacks.checkpoint.compare_copies=false compares nothing"
        )

    def _entries(self, run_state: RunState) -> dict[str, Any]:
        """Manifest entries: iteration, step, layout, config, metric value."""
        return {
            "iteration": run_state.data.next_iteration,
            "step": run_state.step,
            "branch": self.context.branch,
            "layout": run_state.strategy.layout.sizes,
            "config": dict(self.context.hparams),
            "best": self._quality(run_state),
        }

    def _write(self, folder: Path, snapshot: Snapshot, entries: dict[str, Any], is_rank_zero: bool) -> str | None:
        """Write the folder, then prune; returns what went wrong, the same on every process."""
        failure = write_folder(
            folder,
            lambda aside: snapshot.write(aside / STATE_FILE),
            entries,
            gather_first_error=snapshot.gather_first_error,
            is_rank_zero=is_rank_zero,
        )
        if failure is None and is_rank_zero:
            with suppress(OSError):  # what cannot be removed now is removed after the next write
                prune(self.root, self.config.keep, folder)
        return failure

    def _settle(self) -> None:
        """Wait for the write in the background, if there is one.

        Raises:
            CheckpointError: on every process, when it failed on any.
        """
        if self._pending is None:
            return
        (folder, outcome), self._pending = self._pending, None
        stop_on(outcome.result(), folder)

    def _settle_if_written(self, run_state: RunState) -> None:
        """End the run at the end of the iteration if a write has failed, not only when the next save is due."""
        if self._pending is None:
            return
        _, outcome = self._pending
        if run_state.strategy.gather_first_error(None if outcome.done() else "busy") is None:
            self._settle()

    def _quality(self, run_state: RunState) -> dict[str, Any] | None:
        """What ranks this checkpoint among the others, see ``best_of``; None where nothing does."""
        metric, mode = self.config.best_metric, self.config.best_mode
        if metric == AUTO:
            first = next(iter(run_state.data.evaluators), None)
            metric, mode = (None, mode) if first is None else (first.best_metric, first.best_mode)
        if metric is None:
            return None
        value = self.context.metrics_log.value_at(run_state.step, metric)
        if value is None and self.context.is_rank_zero:
            self._warn_unknown_metric(metric)
        return asdict(Quality(metric, mode, value))

    def _warn_unknown_metric(self, metric: str) -> None:
        """Warn once of a metric that should have been logged by now, and was not."""
        records = self.context.metrics_log.records
        known = {name for record in records for name in record.metrics}
        is_late = metric.startswith("val/") and not any(record.kind == "validation" for record in records)
        if metric not in known and not is_late and not self._warned_of_metric:
            self._warned_of_metric = True
            warnings.warn(
                f"callbacks.checkpoint.best_metric={metric}: no such metric is logged, so no checkpoint is the best. "
                + (f"Use {EARLIER_METRICS[metric]}" if metric in EARLIER_METRICS else did_you_mean(metric, known)),
                stacklevel=2,
            )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        run_state = RunState.of(trainer)
        shared: PlainState | None = None
        mine: PlainState = {}
        problem = None
        try:
            shared, mine = self._held(run_state)
        except Exception as error:  # every process must reach the exchange
            problem = in_one_line(error)
        failure = run_state.strategy.gather_first_error(problem)
        if failure is not None:
            raise CheckpointError(f"step {run_state.step}: the checkpoint could not be taken ({failure})")
        checkpoint[UNFINISHED] = shared
        checkpoint[RANKS] = run_state.strategy.collectives.gather_objects(mine)

    def _held(self, run_state: RunState) -> tuple[PlainState | None, PlainState]:
        """(what all ranks know of an unfinished iteration, what this token rank holds of its own)."""
        shared, rows = run_state.data.partial_state() or (None, None)
        data = run_state.data
        held = {"rows": rows, "replay": data.replay.state(), "in_flight": data.in_flight.state()}
        return shared, {"random": random_state(), **held}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        try:
            self._take_over(RunState.of(trainer), checkpoint[UNFINISHED], checkpoint[RANKS])
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
            raise CheckpointError(f"{trainer.ckpt_path}: its samples cannot be read ({in_one_line(error)})") from error

    def _take_over(self, run_state: RunState, shared: PlainState | None, ranks: list[PlainState]) -> None:
        """Restore samples from all saved ranks, and the random state of this token rank where there is one."""
        layout = run_state.strategy.layout
        if shared is not None:
            run_state.data.load_partial_state(shared, [rank["rows"] for rank in ranks])
        run_state.data.replay.load([rank["replay"] for rank in ranks if rank["replay"] is not None], layout)
        run_state.data.in_flight.load(held for rank in ranks if (held := rank.get("in_flight")) is not None)
        if layout.dp_sp_rank < len(ranks):
            set_random_state(ranks[layout.dp_sp_rank]["random"])


def stop_on(failure: str | None, folder: Path) -> None:
    """End the run if its checkpoint could not be written.

    Raises:
        CheckpointError: there is a failure.
    """
    if failure is not None:
        raise CheckpointError(
            f"{folder}: the checkpoint could not be written ({failure}). Earlier checkpoints are whole; "
            "free some space or change output_root, then go on with resume=auto"
        )


def random_state() -> PlainState:
    """State of Python's generator and of torch's, the accelerator's under the name of its kind."""
    state: PlainState = {"torch": torch.get_rng_state(), "python": random.getstate()}
    device = detect_device()
    if device != "cpu":
        state[device] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: PlainState) -> None:
    """Restore what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    device = detect_device()
    if device in state:
        torch.get_device_module(device).set_rng_state(state[device])
