"""Every number of the run, to TensorBoard and to ``metrics.jsonl``: per optimizer step, per iteration, per validation.

Numbers arrive merged over ranks; the first process writes them. Leaves out how they are made (``training/update.py``,
``records/summary.py``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.context import EVENT_FILE, RunContext, RunState
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.iteration_metrics import (
    RunTotals,
    is_scored,
    iteration_metrics,
    scored_advantages,
    without_padding,
)
from rlmodule.records.metrics_log import Record, RecordFile, truncate_after

FILE_NAME = "metrics.jsonl"
# Columns of the HPARAMS tab; it shows the last value of each curve.
FINAL_METRICS = ("val/accuracy", "val/pair_accuracy", "reward/mean")

# Tags are regular expressions. One card each in the CUSTOM SCALARS tab.
CHARTS = {
    "reward": [r"reward/mean", r"val/accuracy", r"val/pair_accuracy"],
    "policy health": [r"actor/entropy", r"actor/ppo_kl", r"actor/clip_frac$", r"actor/grad_norm"],
    "time": [r"timing_s/.*"],
}


@CALLBACKS.register
@dataclass(frozen=True)
class MetricsConfig:
    """What is written beside the curves."""

    histograms: bool = True  # rewards, response lengths and advantages of every iteration, in TensorBoard

    def connect(self, context: RunContext) -> WriteMetrics:
        """The callback for one run."""
        return WriteMetrics(self, context)


class WriteMetrics(L.Callback):
    """Takes the numbers of every step and iteration to the journal, and the journal to disk.

    Args:
        config: what else to write.
        context: names the directory and holds the journal.
    """

    def __init__(self, config: MetricsConfig, context: RunContext) -> None:
        self.config = config
        self.context = context
        self.totals_so_far = RunTotals()
        self._file: RecordFile | None = None
        self._named: set[str] = set()  # metrics that a warning has already called NaN

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the files; what a resumed run will log again is taken out of them."""
        context = self.context
        if not context.is_rank_zero:
            return
        path = context.run_dir / FILE_NAME
        context.metrics_log.records[:0] = truncate_after(path, context.resumed_step)
        self._file = RecordFile(path)
        tensorboard = RunState.of(trainer).tensorboard
        if tensorboard is not None:
            write_hparams(tensorboard, context.hparams)
        context.metrics_log.subscribe(on_record=lambda record: self._write(record, tensorboard))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The responses are in; training on them begins."""
        assert self.context.metrics_log.iteration, "give RLDataModule start=context.journal.begin_iteration"
        self.context.metrics_log.enter("update")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One optimizer step was taken, or skipped."""
        report = RunState.of(trainer).module.last_step
        assert report is not None, "a training step leaves a report"
        self.context.metrics_log.add(Record("step", report.step, self.context.metrics_log.iteration, report.metrics))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """One iteration is over; its numbers stand at the step it reached."""
        run_state, metrics_log = RunState.of(trainer), self.context.metrics_log
        iteration = run_state.data.iteration
        assert iteration is not None, "an epoch has trained on an iteration"
        self.totals_so_far = self.totals_so_far.after(metrics_log.iteration, iteration.sample_info)
        metrics = iteration_metrics(
            iteration, run_state.data.timer.seconds, metrics_log.clock.read(), self.totals_so_far
        )
        if not run_state.data.source.has_rewards:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("reward/")}
        metrics_log.add(Record("iteration", run_state.step, metrics_log.iteration, metrics))
        if self.context.is_rank_zero and self.config.histograms and run_state.tensorboard is not None:
            with metrics_log.warn_on_write_error(EVENT_FILE):
                write_histograms(run_state.tensorboard, iteration, run_state.step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Mark the run as finished in the HPARAMS tab."""
        tensorboard = RunState.of(trainer).tensorboard if self.context.is_rank_zero else None
        if tensorboard is not None:
            with self.context.metrics_log.warn_on_write_error(EVENT_FILE):
                write_hparams_end(tensorboard)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the file."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the file; Lightning closes TensorBoard's."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Samples and tokens so far."""
        return asdict(self.totals_so_far)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.totals_so_far = RunTotals(**state_dict)

    def _write(self, record: Record, tensorboard: SummaryWriter | None) -> None:
        assert self._file is not None, "records are written between the start and the end of a fit"
        with self.context.metrics_log.warn_on_write_error(FILE_NAME):
            self._file.write(record)
        if tensorboard is not None:
            with self.context.metrics_log.warn_on_write_error(EVENT_FILE):
                write_scalars(tensorboard, record)
        self._warn_nan(record)

    def _warn_nan(self, record: Record) -> None:
        new = sorted(name for name, value in record.metrics.items() if math.isnan(value) and name not in self._named)
        self._named.update(new)
        if new:
            warnings.warn(
                f"NaN at step {record.step} ({record.kind}): {', '.join(new)}. Logged as NaN; not named again",
                stacklevel=2,
            )

    def _close(self) -> None:
        if self._file is not None:
            with self.context.metrics_log.warn_on_write_error(FILE_NAME):
                self._file.close()


def purge_step(resumed_step: int | None) -> int | None:
    """First step a resumed run writes again; for ``SummaryWriter(purge_step=...)``, so that no step shows twice."""
    return None if resumed_step is None else resumed_step + 1


def write_scalars(tensorboard: SummaryWriter, record: Record) -> None:
    """One point on the curve of each metric; whole iterations are flushed, so that a running TensorBoard sees them."""
    for name, value in record.metrics.items():
        tensorboard.add_scalar(name, value, record.step)
    if record.kind != "step":
        tensorboard.flush()


def write_histograms(tensorboard: SummaryWriter, iteration: Iteration, step: int) -> None:
    """How rewards, response lengths and advantages of one iteration are spread; an empty one is left out."""
    sample_info = without_padding(iteration.sample_info)
    values = {
        "reward": [f.reward for f in sample_info if is_scored(f)],
        "response_length": [float(f.meta.response_len) for f in sample_info],
        "advantage": scored_advantages(iteration),
    }
    for name, numbers in values.items():
        if numbers:
            tensorboard.add_histogram(f"distribution/{name}", torch.tensor(numbers, dtype=torch.float64), step)


def write_hparams(tensorboard: SummaryWriter, config: Mapping[str, object]) -> None:
    """What stands around the curves: the settings of the run, with its final metrics, and three ready-made charts.

    The HPARAMS tab reads the final metrics off the curves themselves, so no curve gets a second point for it.
    """
    plain = {key: value if _is_number(value) else str(value) for key, value in config.items()}
    experiment, start, _ = _hparams(plain)
    _add(tensorboard, experiment, start)
    tensorboard.add_custom_scalars({"run": {title: ["Multiline", tags] for title, tags in CHARTS.items()}})
    tensorboard.flush()


def write_hparams_end(tensorboard: SummaryWriter) -> None:
    """The run has come to its end."""
    _, _, end = _hparams({})
    _add(tensorboard, end)


def _hparams(plain: dict[str, object]) -> tuple[Any, Any, Any]:
    make: Any = hparams  # torch gives it no type
    experiment, start, end = make(plain, dict.fromkeys(FINAL_METRICS, 0.0))
    return experiment, start, end


def _add(tensorboard: SummaryWriter, *summaries: Any) -> None:
    # SummaryWriter's own add_hparams would open a second run beside this one, and Lightning's goes this way too.
    writer: Any = tensorboard
    for summary in summaries:
        writer._get_file_writer().add_summary(summary)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
