"""TensorBoard: curves, histograms, sampled responses as text, the HPARAMS tab and a few ready-made charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams as hparams_summaries

from rlmodule.loggers import LOGGERS, LoggedRun
from rlmodule.records.metrics_log import Record
from rlmodule.records.run_logger import RunLogger

FOLDER = "tensorboard"

# Columns of the HPARAMS tab; it shows the last value of each curve.
FINAL_METRICS = ("val/reward/mean", "val/pair_accuracy", "val/loss", "reward/mean")

# One card each in the CUSTOM SCALARS tab. Tags are regular expressions.
CHARTS = {
    "reward": [r"^reward/mean", r"^val/reward/mean$", r"^val/pair_accuracy"],
    "policy health": [r"actor/entropy", r"actor/ppo_kl", r"actor/clip_frac$", r"actor/grad_norm"],
    "time": [r"timing_s/.*"],
}

# Characters that markdown or HTML would interpret are written by their number.
_IN_A_CELL = str.maketrans({sign: f"&#{ord(sign)};" for sign in "&<>|`*_~\\[]"} | {"\n": "<br>", "\r": ""})


@LOGGERS.register
@dataclass(frozen=True)
class TensorBoardConfig:
    """Event files in ``<run_dir>/tensorboard``."""

    def connect(self, run: LoggedRun) -> TolerantTensorBoardLogger:
        """Build the logger of one run; the settings also go into TensorBoard's ``hparams.yaml``."""
        logger = TolerantTensorBoardLogger(
            run.run_dir, name=FOLDER, version="", default_hp_metric=False, purge_step=purge_step(run.resumed_step)
        )
        logger.hparams = {"name": run.name, "tags": ", ".join(run.tags), **run.hparams}
        return logger


class TolerantTensorBoardLogger(RunLogger, TensorBoardLogger):
    """Lightning's logger; a run whose event file cannot be written still reaches its end."""

    output: ClassVar[str] = "TensorBoard's event file"

    @property
    def writer(self) -> SummaryWriter:
        """The event file being written."""
        writer: SummaryWriter = self.experiment
        return writer

    def begin(self, hparams: Mapping[str, object], history: Sequence[Record]) -> None:
        """Write the settings for the HPARAMS tab, and the charts.

        The HPARAMS tab reads the final metrics off the curves themselves, so no curve gets a second point for it.
        """
        plain = {key: value if _is_number(value) else str(value) for key, value in hparams.items()}
        experiment, start, _ = _hparams(plain)
        self._add(experiment, start)
        self.writer.add_custom_scalars({"run": {title: ["Multiline", tags] for title, tags in CHARTS.items()}})
        self.writer.flush()

    def write_record(self, record: Record) -> None:
        """One point on the curve of each metric; an iteration is flushed, so that a running TensorBoard shows it."""
        for name, value in record.metrics.items():
            self.writer.add_scalar(name, value, record.step)
        if record.kind != "step":
            self.writer.flush()

    def write_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """A text panel."""
        self.writer.add_text(name, markdown_table(columns, rows), step)

    def write_histogram(self, name: str, values: Sequence[float], step: int) -> None:
        """A histogram with TensorBoard's own bins."""
        self.writer.add_histogram(name, torch.tensor(values, dtype=torch.float64), step)

    def end(self) -> None:
        """Mark the run as finished in the HPARAMS tab."""
        _, _, end = _hparams({})
        self._add(end)

    def finalize(self, status: str) -> None:
        with suppress(OSError):
            super().finalize(status)

    def _add(self, *summaries: Any) -> None:
        # SummaryWriter's own add_hparams would open a second run beside this one; Lightning's logger does it this way.
        writer: Any = self.writer
        for summary in summaries:
            writer._get_file_writer().add_summary(summary)


def purge_step(resumed_step: int | None) -> int | None:
    """First step that a resumed run writes again, for ``SummaryWriter(purge_step=...)``: no step shows twice."""
    return None if resumed_step is None else resumed_step + 1


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The rows as TensorBoard's text panel renders them."""
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    return "\n".join(lines + [f"| {' | '.join(map(_cell, row))} |" for row in rows])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    text = "" if value is None else str(value).strip().translate(_IN_A_CELL)
    # A lone surrogate has no UTF-8 form; it shows as its backslash escape.
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def _hparams(plain: dict[str, object]) -> tuple[Any, Any, Any]:
    make: Any = hparams_summaries  # torch gives it no type
    experiment, start, end = make(plain, dict.fromkeys(FINAL_METRICS, 0.0))
    return experiment, start, end


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
