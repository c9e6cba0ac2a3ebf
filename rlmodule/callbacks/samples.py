"""Every response with its reward, to read: ``rollouts/iteration_000001.jsonl``, and a table of a few in the loggers.

The file is the same on any number of ranks. Leaves out scores made for training (old and reference log-probabilities).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import lightning as L

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.core.config import at_least
from rlmodule.records.rows import Row, evenly_spaced, to_row, write_rows

FOLDER = "rollouts"
PANEL = "samples/train"
PANEL_COLUMNS = ("prompt", "response", "answer", "reward", "finish_reason")


@CALLBACKS.register
@dataclass(frozen=True)
class SamplesConfig:
    """Which iterations are written, and how many of their responses are shown."""

    every_n_iterations: int = 1  # write the responses of every n-th iteration
    num_text_samples: int = 8  # responses in a logger's table, spread over the iteration; 0 for no table

    def __post_init__(self) -> None:
        at_least("every_n_iterations", self.every_n_iterations, 1)
        at_least("num_text_samples", self.num_text_samples, 0)

    def connect(self, context: RunContext) -> WriteSamples:
        return WriteSamples(self, context)


class WriteSamples(L.Callback):
    """Writes responses as soon as they are collected, so that they can be read if training on them fails.

    Args:
        config: which iterations, how many responses.
        context: names the directory.
    """

    def __init__(self, config: SamplesConfig, context: RunContext) -> None:
        self.config = config
        self.context = context
        self._shown: Sequence[Row] = ()  # shown once the iteration has reached its last step

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run_state, iteration = RunState.of(trainer), self.context.metrics_log.iteration
        if not run_state.data.source.is_fresh or iteration % self.config.every_n_iterations:
            return
        context = self.context
        mine = [to_row(x, iteration, context.tokenizer, context.sampling) for x in run_state.data.collected]
        everyone = run_state.strategy.collectives.gather_objects(mine)
        if self.context.is_rank_zero:
            rows = sort_by_sample_id(everyone)
            with self.context.metrics_log.warn_on_write_error(FOLDER):
                write_rows(self.context.run_dir / FOLDER / f"iteration_{iteration:06d}.jsonl", rows)
            self._shown = evenly_spaced(rows, self.config.num_text_samples)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run_state = RunState.of(trainer)
        if self._shown:  # at the step where the metrics of the iteration stand
            cells = [[row[name] for name in PANEL_COLUMNS] for row in self._shown]
            run_state.show(
                self.context.metrics_log,
                lambda logger: logger.write_table(PANEL, PANEL_COLUMNS, cells, run_state.step),
            )
        self._shown = ()


def sort_by_sample_id(parts: Iterable[Iterable[Row]]) -> list[Row]:
    """All ranks' rows sorted by sample id, so the file does not depend on the number of ranks."""
    return sorted((row for part in parts for row in part), key=lambda row: int(row["sample_id"]))
