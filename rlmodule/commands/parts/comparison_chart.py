"""Curves of several runs in one chart: a panel per metric, a line per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlmodule.commands.parts.comparison import ComparedRun

MANY = 8  # runs; up to that many have colours that people who see few colours can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito
DPI = 120


def draw_comparison(runs: Sequence[ComparedRun], metrics: Sequence[str], path: Path) -> None:
    """Draw a panel for each metric; a run without it has no line there."""
    columns = min(2, len(metrics))
    rows = -(-len(metrics) // columns)
    figure = Figure(figsize=(6.5 * columns, 3.6 * rows + 0.3 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    lines: dict[str, Artist] = {}
    for axes, metric in zip(figure.subplots(rows, columns, squeeze=False).flat, metrics, strict=False):
        axes.set_title(metric, loc="left", fontweight="bold")
        axes.set_xlabel("optimizer steps")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for number, run in enumerate(runs, 1):
            steps, values = run.series(metric)
            marker = "o" if len(values) < 30 else ""
            [line] = axes.plot(steps, values, color=_colour(number, len(runs)), marker=marker, markersize=3)
            lines.setdefault(f"{number}  {run.name}", line)
    for axes in figure.axes[len(metrics) :]:
        axes.set_axis_off()
    figure.legend(list(lines.values()), list(lines), loc="outside lower left", ncols=columns, frameon=False)  # type: ignore[call-overload]
    figure.savefig(path, dpi=DPI)


def _colour(number: int, count: int) -> object:
    """Of run ``number`` (from 1) of ``count``."""
    return COLOURS[number - 1] if count <= MANY else colormaps["viridis"]((number - 1) / (count - 1))
