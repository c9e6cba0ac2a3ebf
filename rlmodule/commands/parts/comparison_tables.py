"""Several runs as tables in the terminal: which they are, how they differ, what came of them, and their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlmodule.commands.parts.comparison import UNSET, ComparedRun, Numbers


@dataclass(frozen=True, eq=False)
class Shown:
    """What is shown of runs; every list is in their order.

    Args:
        runs: what is compared.
        settings: dotted key -> values.
        numbers: metric -> numbers.
        curves: metric -> curves as text.
    """

    runs: Sequence[ComparedRun]
    settings: Mapping[str, Sequence[str]]
    numbers: Mapping[str, Sequence[Numbers]]
    curves: Mapping[str, Sequence[str]]


def show(shown: Shown, console: Console | None = None) -> None:
    """Print everything."""
    console = console or Console()
    console.print(_runs(shown.runs))
    if shown.settings:
        console.print(_settings(shown))
    elif len(shown.runs) > 1:
        console.print("the settings are the same")
    if not shown.numbers:
        console.print("no metrics are there yet")
    for metric in shown.numbers:
        console.print(_metric(metric, shown))


def _runs(runs: Sequence[ComparedRun]) -> Table:
    table = Table(title=f"{len(runs)} run{'s' if len(runs) > 1 else ''}", title_justify="left")
    for name, justify in (("", "right"), ("name", "left"), ("iterations", "right"), ("seconds", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("")
    table.add_column("directory", overflow="fold")
    for number, run in enumerate(runs, 1):
        iterations = max((record.iteration for record in run.records), default=0)
        seconds = (run.summary.get("wall_seconds") or {}).get("total")
        shown = UNSET if seconds is None else f"{seconds:,.0f}"
        table.add_row(str(number), escape(run.name), str(iterations), shown, run.ended, escape(_place(run.root)))
    return table


def _settings(shown: Shown) -> Table:
    table = Table(title="settings that differ", title_justify="left")
    table.add_column("key", overflow="fold")
    for number in range(1, len(shown.runs) + 1):
        table.add_column(str(number), justify="right", overflow="fold")
    for key, values in shown.settings.items():
        table.add_row(escape(key), *map(escape, values))
    return table


def _metric(metric: str, shown: Shown) -> Table:
    table = Table(title=metric, title_justify="left")
    for name in ("", "first", "best", "at step", "last"):
        table.add_column(name, justify="right")
    table.add_column("curve", no_wrap=True)
    for number, (of_run, curve) in enumerate(zip(shown.numbers[metric], shown.curves[metric], strict=True), 1):
        step = UNSET if of_run.best_step is None else str(of_run.best_step)
        table.add_row(str(number), _number(of_run.first), _number(of_run.best), step, _number(of_run.last), curve)
    return table


def _place(root: Path) -> str:
    """A directory, from here where it lies below."""
    here = Path.cwd()
    return str(root.relative_to(here)) if root.is_relative_to(here) else str(root)


def _number(value: float | None) -> str:
    return UNSET if value is None else f"{value:.4g}"
