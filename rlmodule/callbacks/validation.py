"""Evaluates the models on held-out rows, at the start, at the end and every few iterations.

Every process evaluates its share, so every process must get here. Leaves out the evaluators (``evaluation.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.core.config import at_least
from rlmodule.experience.iteration_metrics import VALIDATE
from rlmodule.records.metrics_log import Record


@CALLBACKS.register
@dataclass(frozen=True)
class ValidationConfig:
    """When to validate."""

    every_n_iterations: int = 5  # validate after every n-th iteration; 0 for never in between
    at_start: bool = True  # validate before the first update of a new run
    at_end: bool = True  # validate when training ends, unless it just happened

    def __post_init__(self) -> None:
        at_least("every_n_iterations", self.every_n_iterations, 0)

    def connect(self, context: RunContext) -> Validate:
        return Validate(self, context)


class Validate(L.Callback):
    """Runs all evaluators of the run, if it has any.

    Args:
        config: when to validate.
        context: takes the records.
    """

    def __init__(self, config: ValidationConfig, context: RunContext) -> None:
        self.config = config
        self.context = context
        self.history: list[Record] = []  # of the whole run, including before a resume; the same on every rank

    @property
    def latest(self) -> Mapping[str, float]:
        """Metrics of the last validation; empty before the first."""
        return self.history[-1].metrics if self.history else {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The first responses have been sampled by now, and no weight has changed.
        if self.config.at_start and self.context.resumed_step is None:
            self._validate(RunState.of(trainer), iteration=0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        every, iteration = self.config.every_n_iterations, self.context.metrics_log.iteration
        if every and iteration % every == 0:
            self._validate(RunState.of(trainer), iteration)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run_state = RunState.of(trainer)
        if self.config.at_end and (not self.history or self.history[-1].step < run_state.step):
            self._validate(run_state, self.context.metrics_log.iteration)

    def _validate(self, run_state: RunState, iteration: int) -> None:
        evaluators, metrics_log = run_state.data.evaluators, self.context.metrics_log
        if not evaluators:
            return
        with metrics_log.phase(VALIDATE) as spent:
            metrics = {name: value for evaluate in evaluators for name, value in evaluate().items()}
        times = {"timing_s/validation": spent.seconds, "cpu_s/validation": spent.cpu_seconds}
        record = Record("validation", run_state.step, iteration, {**metrics, **times})
        self.history.append(record)
        metrics_log.add(record)

    def state_dict(self) -> dict[str, Any]:
        return {"history": [asdict(record) for record in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = [Record(**record) for record in state_dict["history"]]
