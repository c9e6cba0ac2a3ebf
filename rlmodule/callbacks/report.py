"""Results of the run: ``summary.json``, ``curves.png`` and a table, at the end and also when it is cut short.

Leaves out how the numbers are computed from the metrics log (``records/summary.py``).
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time

import lightning as L
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from rich.box import HEAVY
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import rlmodule
from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.best import best_checkpoint
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.checkpoint.state import oldest_first
from rlmodule.core.config import at_least, at_most
from rlmodule.core.types import CRITIC, POLICY, REWARD_MODEL
from rlmodule.module import Counters
from rlmodule.records.metrics_log import Record, atomic_write
from rlmodule.records.rows import without_nan
from rlmodule.records.run_directory import RunDirectory
from rlmodule.records.summary import (
    COLLAPSED,
    Change,
    HeldOut,
    changes,
    held_out,
    run_totals,
    running_mean,
    series,
)

CURVES = "curves.png"


@CALLBACKS.register
@dataclass(frozen=True)
class ReportConfig:
    """What is made at the end beside ``summary.json`` and the table."""

    curves: bool = True  # draw curves.png
    dpi: int = 120  # dots per inch of curves.png, which is 12 by 8 inches

    def __post_init__(self) -> None:
        at_least("dpi", self.dpi, 1)
        at_most("dpi", self.dpi, 1200)  # at which curves.png has 138 million pixels

    def connect(self, context: RunContext) -> WriteReport:
        return WriteReport(self, context, Console(file=sys.stdout))


class WriteReport(L.Callback):
    """Writes and prints the report once, on the first process.

    Args:
        config: what to make.
        context: the run and its metrics log.
        console: where to print.
    """

    def __init__(self, config: ReportConfig, context: RunContext, console: Console) -> None:
        self.config = config
        self.context = context
        self.console = console
        self.is_due = context.is_rank_zero

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.context.is_rank_zero:  # a summary from before a resume no longer holds
            RunDirectory(self.context.run_dir).summary.unlink(missing_ok=True)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._report(trainer, finished=True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._report(trainer, finished=False)

    def _report(self, trainer: L.Trainer, *, finished: bool) -> None:
        records = self.context.metrics_log.records
        if not self.is_due or not records:
            return
        self.is_due = False
        directory = RunDirectory(self.context.run_dir)
        curves = directory.root / CURVES
        if self.config.curves:
            with self.context.metrics_log.warn_on_write_error(CURVES), atomic_write(curves) as aside:
                draw_curves(records, aside, self.config.dpi)
        named = {"name": self.context.name, "tags": list(self.context.tags)}
        summary = {
            "finished": finished,
            **named,
            **run_totals(records),
            **self._run_summary(RunState.of(trainer), directory),
        }
        with (
            self.context.metrics_log.warn_on_write_error(directory.summary.name),
            atomic_write(directory.summary) as aside,
        ):
            aside.write_text(json.dumps(without_nan(summary), indent=2) + "\n", encoding="utf-8")
        self.console.print(table(changes(records), "run finished" if finished else "run stopped before its end"))
        if words := nothing_trained(RunState.of(trainer).module.counters):
            self.console.print(words, soft_wrap=True, highlight=False, markup=False)
        result = held_out(records)
        if result is not None and result.loss:
            best = best_checkpoint(directory, records)
            is_exported = any((directory.root / name).exists() for name in (POLICY, REWARD_MODEL))
            self.console.print(warning(result, self.context, best, is_exported=is_exported))
        for label, place in output_paths(directory, records).items():
            words = f"tensorboard --logdir {directory.root}" if label == "tensorboard" else place
            self.console.print(f"{label:<12} {words}", soft_wrap=True, highlight=False, markup=False)

    def _run_summary(self, run_state: RunState, directory: RunDirectory) -> dict[str, object]:
        counters, layout = run_state.module.counters, run_state.strategy.layout
        return {
            "steps": counters.steps,
            "optimizer_steps": counters.optimizer_steps,
            "skipped_steps": counters.skipped,
            "empty_steps": counters.empty,
            **{name.replace("/", "_"): int(count) for name, count in self.context.metrics_log.counts.items()},
            "process": {"wall_seconds": perf_counter() - self.context.started, "cpu_seconds": process_time()},
            "seed": self.context.hparams.get("seed"),
            "layout": layout.sizes,
            "plan": dict(self.context.describe),
            "versions": versions(),
            "paths": output_paths(directory, self.context.metrics_log.records),
        }


def nothing_trained(counters: Counters) -> str:
    """What is said of a run in which no optimizer step was taken; empty for all others."""
    if counters.optimizer_steps or not counters.steps:
        return ""
    causes = {
        "in which no sample could have a gradient (rewards were equal in every group)": counters.zero_gradient,
        "without a token to learn from": counters.empty,
        "whose gradient was not finite": counters.skipped,
    }
    found = " and ".join(f"{count} {what}" for what, count in causes.items() if count)
    return f"no optimizer step was taken, so the weights are those of the start: mini-batches were {found}"


def warning(result: HeldOut, context: RunContext, best: Path | None, *, is_exported: bool) -> Panel:
    """What is said of a run that ends worse than it began, in a box that cannot be overlooked.

    Args:
        result: what it came to.
        context: its settings.
        best: its best checkpoint; None where none is as good as the start.
        is_exported: whether the run has written a Hugging Face folder.
    """
    what = "NOTHING IS LEFT OF THE HELD-OUT REWARD" if result.loss == COLLAPSED else "THE RUN ENDS WORSE THAN IT BEGAN"
    when = f"after iteration {result.best_iteration}" if result.best_iteration else "before the first update"
    if best is not None:
        kept = f"The best state is kept in {best}" + (", and is what was exported" if is_exported else "")
    elif result.best_iteration:
        kept = "The best state was not saved: set callbacks.checkpoint.every_n_iterations=1"
    else:
        kept = "No state that was saved is as good as the policy that the run started from: use that one"
    if best is None and not is_exported:
        kept += ". The last one is not exported"
    text = (
        f"{result.name}: {result.start:.3f} at the start, {result.best:.3f} at best ({when}), {result.end:.3f} at the "
        f"end.\n{kept}.\nThe learning rate is the first thing to lower: optimizer.lr is "
        f"{context.hparams.get('optimizer.lr')}."
    )
    return Panel(Text(text), title=what, title_align="left", border_style="bold red", box=HEAVY)


def output_paths(directory: RunDirectory, records: Sequence[Record] = ()) -> dict[str, str]:
    """Label -> path of everything that the run has left behind."""
    root = directory.root
    checkpoints = oldest_first(directory.checkpoints)
    best = best_checkpoint(directory, records)
    found = {
        "run": root,
        "metrics": root / "metrics.jsonl",
        "table": root / "metrics.csv",
        "curves": root / CURVES,
        "log": root / "train.log",
        "rollouts": root / "rollouts",
        "validation": root / "validation",
        "checkpoint": checkpoints[-1] if checkpoints else directory.checkpoints,
        **({"best": best} if best is not None else {}),
        POLICY: directory.policy,
        CRITIC: root / CRITIC,
        REWARD_MODEL: root / REWARD_MODEL,
        "tensorboard": root / "tensorboard",
    }
    return {label: str(path) for label, path in found.items() if path.exists()}


def versions() -> dict[str, str]:
    """Versions of Python and of the main libraries."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "transformers": version("transformers"),
        "rlmodule": rlmodule.__version__,
    }


def table(lines: Sequence[Change], title: str) -> Table:
    """The table that is printed at the end: main metrics at the start, at their best on held-out rows, and at the end.

    Without held-out rows there is no best.
    """
    names = ("start", "best", "end") if any(line.best for line in lines) else ("start", "end")
    grid = Table(title=title, title_justify="left", title_style="bold")
    grid.add_column("")
    for name in names:
        grid.add_column(name, justify="right")
    for line in lines:
        grid.add_row(line.label, *(str(getattr(line, name)) for name in names))
    return grid


@dataclass(frozen=True)
class Curve:
    """One metric in a panel; ``on_right`` gives it the axis on the right."""

    metric: str
    label: str
    colour: str
    on_right: bool = False


@dataclass(frozen=True)
class Plot:
    """One of the four plots; ``left`` and ``right`` label its axes, with the unit."""

    title: str
    left: str
    curves: tuple[Curve, ...]
    right: str = ""


# Distinguishable by people who see few colours (Okabe and Ito, Color universal design, 2008).
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"

PANELS = (
    Plot(
        "Reward",
        "mean reward",
        (
            Curve("reward/mean", "training samples", BLUE),
            Curve("val/reward/mean", "held-out prompts", ORANGE),
            Curve("val/pair_accuracy", "held-out pairs, accuracy", GREEN),
        ),
    ),
    Plot(
        "Loss and distance from the sampling policy",
        "loss; KL in nats per token",
        (
            Curve("actor/pg_loss", "policy loss", BLUE),
            Curve("val/loss", "held-out loss", GREEN),
            Curve("reward_model/loss", "loss", BLUE),
            Curve("actor/ppo_kl", "KL", ORANGE),
            Curve("actor/clip_frac", "clipped tokens (right)", GREEN, on_right=True),
        ),
        right="share of loss tokens clipped",
    ),
    Plot(
        "Entropy and gradient",
        "entropy, nats per token",
        (
            Curve("actor/entropy", "entropy", BLUE),
            Curve("actor/grad_norm", "gradient norm (right)", ORANGE, on_right=True),
            Curve("reward_model/grad_norm", "gradient norm (right)", ORANGE, on_right=True),
        ),
        right="gradient norm before clipping",
    ),
    Plot(
        "Length and time",
        "response length, tokens",
        (
            Curve("response_length/mean", "response length", BLUE),
            Curve("timing_s/iteration", "time per iteration (right)", ORANGE, on_right=True),
        ),
        right="time per iteration, seconds",
    ),
)

NOISY_FROM = 40  # points from which a curve is drawn faint, with a running mean over it
SMOOTHED_SHARE = 20  # the running mean spans one point in this many


def draw_curves(records: Sequence[Record], path: Path, dpi: int) -> None:
    """Draw four panels over optimizer steps; a metric that was never logged is left out."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    end = max(1, *(record.step for record in records))
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        axes.set_xlim(-0.02 * end, 1.02 * end)
        draw_panel(axes, panel, records)
    figure.savefig(path, dpi=dpi)


def draw_panel(axes: Axes, panel: Plot, records: Sequence[Record]) -> None:
    """Draw one panel: title, legend, curves, labels of the axes."""
    axes.set_title(panel.title, loc="left", fontweight="bold", pad=26)  # points; the legend goes between
    axes.set_xlabel("optimizer steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    drawn = [curve for curve in panel.curves if series(records, curve.metric)[0]]
    measured = [curve for curve in drawn if curve.on_right]
    sides = {False: axes, True: axes.twinx() if measured else axes}
    sides[True].set_ylabel(panel.right)
    axes.set_ylabel(panel.left)
    for side in sides.values():
        side.spines[["top"] if measured else ["top", "right"]].set_visible(False)
    lines = [line for curve in drawn for line in _draw_curve(sides[curve.on_right], curve, records)]
    if lines:
        axes.legend(handles=lines, loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=3, frameon=False)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center", color="grey")


def _draw_curve(axes: Axes, curve: Curve, records: Sequence[Record]) -> list[Line2D]:
    """Draw one curve; returns its handle for the legend, in a list as matplotlib gives it."""
    steps, values = series(records, curve.metric)
    is_noisy = len(values) >= NOISY_FROM
    if is_noisy:
        axes.plot(steps, values, color=curve.colour, alpha=0.18, linewidth=0.8)
        values = running_mean(values, len(values) // SMOOTHED_SHARE)
    marker = "" if is_noisy else "o"
    return axes.plot(steps, values, color=curve.colour, linewidth=1.6, marker=marker, markersize=3, label=curve.label)
