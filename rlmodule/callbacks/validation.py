"""Held-out accuracy: greedy answers to prompts that are never trained on, now and then.

Every process answers its share, so every process must get here. Leaves out sampling and scoring (``sources.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L

from rlmodule.callbacks import CALLBACKS
from rlmodule.core.config import at_least
from rlmodule.experience.facts import gather_facts
from rlmodule.journal import Record
from rlmodule.run_context import RunContext, Running
from rlmodule.summary import VALIDATE, validation_metrics


@CALLBACKS.register
@dataclass(frozen=True)
class ValidationSettings:
    """When to validate."""

    every_n_iterations: int = 5  # validate after every n-th iteration; 0 for never in between
    at_start: bool = True  # validate before the first update of a new run
    at_end: bool = True  # validate when training ends, unless it just happened

    def __post_init__(self) -> None:
        at_least("every_n_iterations", self.every_n_iterations, 0)

    def connect(self, context: RunContext) -> Validate:
        """The callback for one run."""
        return Validate(self, context)


class Validate(L.Callback):
    """Validates where the run has an examination.

    Args:
        settings: when.
        context: takes the records.
    """

    def __init__(self, settings: ValidationSettings, context: RunContext) -> None:
        self.settings = settings
        self.context = context
        self.history: list[Record] = []  # all of the run, also from before a resume; the same on every rank

    @property
    def latest(self) -> Mapping[str, float]:
        """Metrics of the last validation (``val/accuracy`` is the one to compare); empty before the first."""
        return self.history[-1].metrics if self.history else {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before any update; the first responses are there by now, and they changed no weight."""
        if self.settings.at_start and self.context.resumed_step is None:
            self._validate(Running.of(trainer), iteration=0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After every n-th iteration, counted from the start of the run."""
        every, iteration = self.settings.every_n_iterations, self.context.journal.iteration
        if every and iteration % every == 0:
            self._validate(Running.of(trainer), iteration)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The result of the run."""
        running = Running.of(trainer)
        if self.settings.at_end and (not self.history or self.history[-1].step < running.step):
            self._validate(running, self.context.journal.iteration)

    def _validate(self, running: Running, iteration: int) -> None:
        examine, journal = running.data.examine, self.context.journal
        if examine is None:
            return
        with journal.phase(VALIDATE) as lap:
            _, facts = gather_facts(examine, running.strategy.collectives)
        record = Record("validation", running.step, iteration, validation_metrics(facts, lap))
        self.history.append(record)
        journal.add(record)

    def state_dict(self) -> dict[str, Any]:
        """Results so far."""
        return {"history": [asdict(record) for record in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Results from before a resume."""
        self.history = [Record(**record) for record in state_dict["history"]]
