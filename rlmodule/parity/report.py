"""Runs every layout and says how far each is from one process, and whether that is rounding (``command=parity``)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlmodule.core.errors import RLModuleError, TrainingError
from rlmodule.parity.compare import GRAD_NORM, LOSS, largest_of, metric_differences
from rlmodule.parity.config import ParityConfig
from rlmodule.parity.layouts import REFERENCE, ParityLayout, chosen
from rlmodule.parity.ranks import REFERENCE_FILE, Outcome, run_for_layout, run_layout
from rlmodule.run.run import Run

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
FILE_NAME = "parity.json"
WIDTH = 110  # columns of the table in a log file
COLOURS = {PASS: "green", FAIL: "bold red", SKIP: "yellow"}


@dataclass(frozen=True)
class LayoutResult:
    """One row of the table.

    Args:
        name, title: of the layout.
        result: PASS, FAIL or SKIP.
        reason: why it failed or was skipped; empty otherwise.
        loss, grad_norm, parameters, metrics: largest relative differences to one process.
        worst_metric, worst_parameter: which of them is furthest off.
        seconds: of training.
        by_metric: difference of each metric.
    """

    name: str
    title: str
    result: str
    reason: str = ""
    loss: float | None = None
    grad_norm: float | None = None
    parameters: float | None = None
    metrics: float | None = None
    worst_metric: str = ""
    worst_parameter: str = ""
    seconds: float | None = None
    by_metric: dict[str, float] = field(default_factory=dict)


def check_parity(run: Run, config: ParityConfig, console: Console | None = None) -> bool:
    """Compare every layout with one process; prints the table, writes ``parity.json``, returns whether none failed.

    Raises:
        TrainingError: one process alone cannot train, so there is nothing to compare with.
    """
    console = console or (Console() if Console().is_terminal else Console(width=WIDTH))
    where = run.run_dir.root / FILE_NAME
    run.run_dir.root.mkdir(parents=True, exist_ok=True)
    try:
        results = _results(run, config, console)
    finally:
        (run.run_dir.root / REFERENCE_FILE).unlink(missing_ok=True)
    write(where, results, config)
    console.print(table(results, config))
    for v in results:
        if v.reason:
            console.print(f"{v.result} {v.title}: {v.reason}", highlight=False, markup=False)
    count = {word: sum(v.result == word for v in results) for word in (PASS, FAIL, SKIP)}
    console.print(f"{count[PASS]} passed, {count[FAIL]} failed, {count[SKIP]} skipped; {where}", highlight=False)
    return count[FAIL] == 0


def _results(run: Run, config: ParityConfig, console: Console) -> list[LayoutResult]:
    """Every layout after the other; the first one is what the others are compared with."""
    results: list[LayoutResult] = []
    reference: Outcome | None = None
    for layout in chosen(config.layouts):
        console.print(f"parity: {layout.title} ...", highlight=False)
        cut = run_for_layout(run, layout, config)
        reason = refusal(cut)
        if reason is not None:
            results.append(LayoutResult(layout.name, layout.title, SKIP, reason))
            continue
        outcome = run_layout(cut, config, is_reference=reference is None)
        if reference is None:
            if isinstance(outcome, str):
                raise TrainingError(f"parity: one process alone cannot train this model. {outcome}")
            reference = outcome
        results.append(compare_layout(layout, outcome, reference, config))
    return results


def refusal(run: Run) -> str | None:
    """Why this machine, installation or model cannot run a layout, or None."""
    try:
        run.check_strategy()
    except RLModuleError as error:
        return str(error)
    return None


def compare_layout(
    layout: ParityLayout, outcome: Outcome | str, reference: Outcome, config: ParityConfig
) -> LayoutResult:
    """Hold what came out against the reference and the tolerances."""
    if isinstance(outcome, str):
        return LayoutResult(layout.name, layout.title, FAIL, outcome.strip())
    differences = metric_differences(outcome.steps, reference.steps)
    worst = max(differences, key=lambda name: differences[name])
    too_far = {name: d for name, d in differences.items() if not d <= config.tolerance}
    reasons = [f"{name} is off by {d:.1e} (tolerance {config.tolerance:.0e})" for name, d in too_far.items()]
    if not outcome.parameters <= config.parameter_tolerance:
        reasons.append(
            f"weight {outcome.worst_parameter} is off by {outcome.parameters:.1e} "
            f"(tolerance {config.parameter_tolerance:.0e})"
        )
    return LayoutResult(
        layout.name,
        layout.title + (" (reference)" if layout is REFERENCE else ""),
        FAIL if reasons else PASS,
        "; ".join(reasons),
        loss=largest_of(LOSS, differences),
        grad_norm=largest_of(GRAD_NORM, differences),
        parameters=outcome.parameters,
        metrics=differences[worst],
        worst_metric=worst,
        worst_parameter=outcome.worst_parameter,
        seconds=outcome.seconds,
        by_metric=differences,
    )


def table(results: list[LayoutResult], config: ParityConfig) -> Table:
    """For people; differences are relative, see ``compare.py``."""
    made = Table(
        title=f"{config.steps} optimizer steps: largest relative difference to one process",
        caption=f"tolerance {config.tolerance:.0e}, weights {config.parameter_tolerance:.0e}",
    )
    made.add_column("layout", no_wrap=True)
    for name in ("loss", "grad norm", "weights", "metrics", "seconds"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("")
    for v in results:
        numbers = [_short(x) for x in (v.loss, v.grad_norm, v.parameters, v.metrics)]
        seconds = "" if v.seconds is None else f"{v.seconds:.1f}"
        made.add_row(v.title, *numbers, seconds, f"[{COLOURS[v.result]}]{v.result}[/]")
    return made


def _short(number: float | None) -> str:
    return "" if number is None else ("0" if number == 0 else f"{number:.1e}")


def write(path: Path, results: list[LayoutResult], config: ParityConfig) -> None:
    """For programs."""
    content: dict[str, Any] = {"parity": asdict(config), "layouts": [asdict(v) for v in results]}
    path.write_text(json.dumps(content, indent=1))
