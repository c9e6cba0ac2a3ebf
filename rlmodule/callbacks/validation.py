"""Evaluates the models on held-out rows, at the start, at the end and every few iterations.

Every process evaluates its share, so every process must get here. The answers are written to
``validation/iteration_000005.jsonl``, the same on any number of ranks, and a few are shown in the loggers. Leaves out
the evaluators (``rlmodule/evaluation/``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.core.config import at_least
from rlmodule.core.evaluations import EvaluatedAnswer
from rlmodule.experience.iteration_metrics import VALIDATE
from rlmodule.records.metrics_log import Record
from rlmodule.records.rows import evenly_spaced, without_nan, write_rows

FOLDER = "validation"
PANEL = "samples/validation"
PANEL_COLUMNS = ("source", "prompt", "response", "answer", "extracted", "reward", "parts", "finish_reason")


@CALLBACKS.register
@dataclass(frozen=True)
class ValidationConfig:
    """When to validate."""

    every_n_iterations: int = 5  # validate after every n-th iteration; 0 for never in between
    at_start: bool = True  # validate before the first update of a new run
    at_end: bool = True  # validate when training ends, unless it just happened
    write_answers: bool = True  # every answer to a held-out prompt with its reward, to validation/*.jsonl
    num_text_samples: int = 8  # answers in a logger's table, spread over the prompts; 0 for no table

    def __post_init__(self) -> None:
        at_least("every_n_iterations", self.every_n_iterations, 0)
        at_least("num_text_samples", self.num_text_samples, 0)

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
            made = [evaluate() for evaluate in evaluators]
        times = {"timing_s/validation": spent.seconds, "cpu_s/validation": spent.cpu_seconds}
        metrics = {name: value for evaluation in made for name, value in evaluation.metrics.items()}
        record = Record("validation", run_state.step, iteration, {**metrics, **times})
        self.history.append(record)
        metrics_log.add(record)
        answers = [answer for evaluation in made for answer in evaluation.answers]
        if answers and self.context.is_rank_zero:
            self._write(answers, run_state, iteration)

    def _write(self, answers: Sequence[EvaluatedAnswer], run_state: RunState, iteration: int) -> None:
        """Write the answers, and show some of them."""
        rows, metrics_log = [asdict(answer) for answer in answers], self.context.metrics_log
        if self.config.write_answers:
            with metrics_log.warn_on_write_error(FOLDER):
                path = self.context.run_dir / FOLDER / f"iteration_{iteration:06d}.jsonl"
                write_rows(path, [{"iteration": iteration, **without_nan(row)} for row in rows])
        shown = evenly_spaced(rows, self.config.num_text_samples)
        cells = [[cell(row[name]) for name in PANEL_COLUMNS] for row in shown]
        if cells:
            run_state.show(metrics_log, lambda logger: logger.write_table(PANEL, PANEL_COLUMNS, cells, run_state.step))

    def state_dict(self) -> dict[str, Any]:
        return {"history": [asdict(record) for record in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = [Record(**record) for record in state_dict["history"]]


def cell(value: object) -> object:
    """A value as a table shows it; components of a reward as ``name 0.5, name 1``."""
    return ", ".join(f"{name} {part:g}" for name, part in value.items()) if isinstance(value, Mapping) else value
