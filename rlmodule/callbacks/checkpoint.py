"""Saves what resumes the run, at the end of an iteration: model, optimizer, schedule, random state, place in the data.

Leaves out how a folder is written safely (``checkpoint/state.py``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from rlmodule.callbacks import CALLBACKS
from rlmodule.checkpoint.state import STATE_FILE, folder_of, prune, write_folder_together
from rlmodule.core.config import at_least
from rlmodule.core.errors import CheckpointError
from rlmodule.run_context import RunContext, Running


@CALLBACKS.register
@dataclass(frozen=True)
class CheckpointSettings:
    """When to save, and how many to keep."""

    every_n_iterations: int = 1  # the last iteration is always saved
    keep: int = 2  # newest checkpoints that stay on disk

    def __post_init__(self) -> None:
        at_least("every_n_iterations", self.every_n_iterations, 1)
        at_least("keep", self.keep, 1)

    def connect(self, context: RunContext) -> SaveCheckpoints:
        """The callback for one run."""
        return SaveCheckpoints(self, context.run_dir / "checkpoints", context.max_iterations)


class SaveCheckpoints(Checkpoint):
    """Lightning runs callbacks of this base class last, so what the others keep is up to date when it is saved."""

    def __init__(self, settings: CheckpointSettings, root: Path, max_iterations: int) -> None:
        super().__init__()
        self.settings = settings
        self.root = root
        self.max_iterations = max_iterations

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
        done = running.data.next_iteration
        must_stop = self._all_must_stop(running)
        if done % self.settings.every_n_iterations and done < self.max_iterations and not must_stop:
            return
        folder = folder_of(self.root, done)
        self._save(running, folder)
        if must_stop and done < self.max_iterations:
            running.module.stop_requests.stop(folder)

    def _all_must_stop(self, running: Running) -> bool:
        """Data ranks know from the step's metrics; where a row or a matrix is shared, its ranks ask each other."""
        layout, must_stop = running.strategy.layout, running.module.must_stop
        if layout.dp_size == layout.world_size:
            return must_stop
        return running.strategy.agree("stop" if must_stop else None) is not None

    def _save(self, running: Running, folder: Path) -> None:
        trainer, done = running.trainer, running.data.next_iteration
        facts = {"iteration": done, "step": running.step, "world_size": trainer.world_size}
        failure = write_folder_together(
            folder,
            lambda aside: trainer.save_checkpoint(aside / STATE_FILE),
            facts,
            agree=running.strategy.agree,
            is_first=trainer.is_global_zero,
        )
        if failure is None and trainer.is_global_zero:
            prune(self.root, self.settings.keep, folder)
        if failure is not None:
            raise CheckpointError(
                f"{folder}: the checkpoint could not be written ({failure}). Earlier checkpoints are whole; "
                "free some space or change output_root, then go on with resume=auto"
            )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep every token rank's random state beside the model, and its rows of an iteration under way."""
        running = Running.of(trainer)
        checkpoint["random_states"] = running.strategy.collectives.gather_objects(random_state())
        rows = running.data.unfinished()
        if rows is not None:
            parcel = torch.frombuffer(bytearray(rows), dtype=torch.uint8)  # torch.load reads tensors, not objects
            checkpoint["unfinished"] = running.strategy.collectives.gather_objects(parcel)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Bring back the random state of this token rank, where the checkpoint knows one."""
        running = Running.of(trainer)
        running.data.take_up([parcel.numpy().tobytes() for parcel in checkpoint.get("unfinished", ())])
        states = checkpoint["random_states"]
        rank = running.strategy.layout.token_rank
        if rank < len(states):
            set_random_state(states[rank])


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
