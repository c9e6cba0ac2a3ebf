"""Every number of the run, to ``metrics.jsonl`` and to the loggers: per optimizer step, iteration and validation.

Numbers arrive merged over ranks; the first process writes them. Leaves out how they are made (``training/update.py``,
``experience/iteration_metrics.py``) and what a logger makes of them (``loggers/``).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import lightning as L

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.iteration_metrics import (
    RunTotals,
    iteration_metrics,
    scored_advantages,
    without_padding,
)
from rlmodule.records.metrics_log import Record, RecordFile, truncate_after
from rlmodule.records.run_logger import RunLogger

FILE_NAME = "metrics.jsonl"


@CALLBACKS.register
@dataclass(frozen=True)
class MetricsConfig:
    """What is written beside the curves."""

    histograms: bool = True  # rewards, response lengths and advantages of every iteration, where a logger shows them

    def connect(self, context: RunContext) -> WriteMetrics:
        return WriteMetrics(self, context)


class WriteMetrics(L.Callback):
    """Adds the numbers of every step and iteration to the metrics log, and writes the log to disk and to the loggers.

    Args:
        config: what else to write.
        context: names the directory and holds the metrics log.
    """

    def __init__(self, config: MetricsConfig, context: RunContext) -> None:
        self.config = config
        self.context = context
        self.totals_so_far = RunTotals()
        self._file: RecordFile | None = None
        self._warned: set[str] = set()  # metrics that a warning has already named as NaN

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        context = self.context
        if not context.is_rank_zero:
            return
        path, log, run_state = context.run_dir / FILE_NAME, context.metrics_log, RunState.of(trainer)
        history = truncate_after(path, context.resumed_step)  # a resumed run logs the rest again
        log.records[:0] = history
        self._file = RecordFile(path)
        run_state.show(log, lambda logger: logger.begin(context.hparams, history))
        log.subscribe(on_record=lambda record: self._write(record, run_state))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.context.metrics_log.iteration, "give RLDataModule start=context.metrics_log.begin_iteration"
        self.context.metrics_log.enter("update")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        report = RunState.of(trainer).module.last_step
        assert report is not None, "a training step leaves a report"
        self.context.metrics_log.add(Record("step", report.step, self.context.metrics_log.iteration, report.metrics))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run_state, metrics_log = RunState.of(trainer), self.context.metrics_log
        iteration = run_state.data.iteration
        assert iteration is not None, "an epoch has trained on an iteration"
        self.totals_so_far = self.totals_so_far.after(metrics_log.iteration, iteration.sample_info)
        data, number = run_state.data, metrics_log.iteration - 1
        metrics = iteration_metrics(
            iteration,
            data.timer.seconds,
            metrics_log.clock.read(),
            self.totals_so_far,
            policy_version=number if data.source.is_fresh else None,
        )
        metrics |= data.ledger_metrics()
        if not data.source.has_rewards:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("reward/")}
        metrics_log.add(Record("iteration", run_state.step, metrics_log.iteration, {**metrics, **metrics_log.counts}))
        if self.context.is_rank_zero and self.config.histograms:
            for name, values in distributions(iteration).items():
                run_state.show(metrics_log, partial(_write_histogram, name=name, values=values, step=run_state.step))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.context.is_rank_zero:
            RunState.of(trainer).show(self.context.metrics_log, lambda logger: logger.end())

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.totals_so_far)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.totals_so_far = RunTotals(**state_dict)

    def _write(self, record: Record, run_state: RunState) -> None:
        assert self._file is not None, "records are written between the start and the end of a fit"
        with self.context.metrics_log.warn_on_write_error(FILE_NAME):
            self._file.write(record)
        run_state.show(self.context.metrics_log, lambda logger: logger.write_record(record))
        self._warn_nan(record)

    def _warn_nan(self, record: Record) -> None:
        new = sorted(name for name, value in record.metrics.items() if math.isnan(value) and name not in self._warned)
        self._warned.update(new)
        if new:
            warnings.warn(
                f"NaN at step {record.step} ({record.kind}): {', '.join(new)}. Logged as NaN; not named again",
                stacklevel=2,
            )

    def _close(self) -> None:
        if self._file is not None:
            with self.context.metrics_log.warn_on_write_error(FILE_NAME):
                self._file.close()


def distributions(iteration: Iteration) -> dict[str, list[float]]:
    """Rewards, response lengths and advantages of one iteration, for histograms; what has no value is left out."""
    sample_info = without_padding(iteration.sample_info)
    values = {
        "distribution/reward": sample_info.reward[sample_info.is_scored].tolist(),
        "distribution/response_length": sample_info.metas.response_len.astype(float).tolist(),
        "distribution/advantage": scored_advantages(iteration).tolist(),
    }
    return {name: numbers for name, numbers in values.items() if numbers}


def _write_histogram(logger: RunLogger, *, name: str, values: list[float], step: int) -> None:
    logger.write_histogram(name, values, step)
