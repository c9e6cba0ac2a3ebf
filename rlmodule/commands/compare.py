"""``command=compare RUN RUN ...``: differing settings, main numbers and curves of several runs, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.commands.parts.comparison import (
    ComparedRun,
    chosen_metrics,
    differing_settings,
    find_runs,
    numbers_of,
    sparkline,
)
from rlmodule.commands.parts.comparison_chart import draw_comparison
from rlmodule.commands.parts.comparison_tables import Shown, show
from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.records.metrics_log import atomic_write


@COMMANDS.register
@dataclass(frozen=True)
class Compare(Command):
    """Tables, curves as text, and a chart; folders that hold runs, such as sweeps, stand for all runs below."""

    has_run_dir: ClassVar[bool] = False

    runs: list[str] = field(default_factory=list)  # run directories, or folders that hold some
    metrics: list[str] = field(default_factory=list)  # as in metrics.jsonl; empty for held-out numbers and rewards
    chart: str | None = "compare.png"  # file to draw the curves into; null for none
    width: int = 40  # characters of a curve in the terminal

    def __post_init__(self) -> None:
        at_least("width", self.width, 5)

    def __call__(self, invocation: Invocation) -> int:
        """Print the tables and draw the chart; no model is loaded.

        Raises:
            RLModuleError: there are no runs, or no such metric.
        """
        if not self.runs:
            raise ConfigError(
                key="command.runs", got=[], because="there is nothing to compare", fix="Use compare RUN_DIR RUN_DIR"
            )
        runs = find_runs([Path(run) for run in self.runs])
        metrics = chosen_metrics(runs, self.metrics)
        numbers = {metric: [numbers_of(run, metric) for run in runs] for metric in metrics}
        curves = {metric: self._curves(runs, metric) for metric in metrics}
        show(Shown(runs, differing_settings(runs), numbers, curves))
        if self.chart is not None and metrics:
            print(f"chart        {self._drawn(runs, metrics)}")
        return 0

    def _curves(self, runs: list[ComparedRun], metric: str) -> list[str]:
        """The curve of each run as text, all on one scale."""
        values = [run.series(metric)[1] for run in runs]
        everything = [value for of_run in values for value in of_run]
        low, high = min(everything, default=0.0), max(everything, default=0.0)  # a metric may be NaN from end to end
        return [sparkline(of_run, self.width, low, high) for of_run in values]

    def _drawn(self, runs: list[ComparedRun], metrics: list[str]) -> Path:
        path = Path(str(self.chart)).absolute()
        if path.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ConfigError(
                key="command.chart", got=self.chart, because="it is no .png, .svg or .pdf", fix="Use compare.png"
            )
        try:
            with atomic_write(path) as aside:
                draw_comparison(runs, metrics, aside)
        except OSError as error:
            raise TrainingError(
                f"{path}: it cannot be written ({error.strerror}). Use another command.chart"
            ) from error
        return path
