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
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from rlmodule.callbacks import CALLBACKS
from rlmodule.checkpoint.state import STATE_FILE, folder_of, prune, write_folder
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

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save where it is due."""
        running = Running.of(trainer)
        done = running.data.next_iteration
        if done % self.settings.every_n_iterations and done < self.max_iterations:
            return
        folder = folder_of(self.root, done)
        facts = {"iteration": done, "step": running.step, "world_size": trainer.world_size}
        io = _WriteAside(folder, facts, self.settings.keep)
        trainer.strategy.checkpoint_io = io
        trainer.save_checkpoint(folder / STATE_FILE)
        failure = running.strategy.collectives.broadcast(io.failure)
        if failure is not None:
            raise CheckpointError(
                f"{folder}: the checkpoint could not be written ({failure}). Earlier checkpoints are whole; "
                "free some space or change output_root, then go on with resume=auto"
            )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep every data rank's random state beside the model."""
        checkpoint["random_states"] = Running.of(trainer).strategy.collectives.gather_objects(random_state())

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Bring back the random state of this data rank, where the checkpoint knows one."""
        states = checkpoint["random_states"]
        rank = Running.of(trainer).strategy.layout.dp_rank
        if rank < len(states):
            set_random_state(states[rank])


class _WriteAside(CheckpointIO):
    """Writes the state into a checked folder; a failure is kept, so that all ranks can stop together."""

    def __init__(self, folder: Path, facts: dict[str, Any], keep: int) -> None:
        self.folder = folder
        self.facts = facts
        self.keep = keep
        self.failure: str | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        try:
            write_folder(self.folder, lambda aside: torch.save(checkpoint, aside / STATE_FILE), self.facts)
            prune(self.folder.parent, self.keep, self.folder)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        raise AssertionError("this writer does not read")

    def remove_checkpoint(self, path: Any) -> None:
        raise AssertionError("prune() removes checkpoints")


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
