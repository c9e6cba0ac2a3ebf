"""Runs every layout and says how far each is from one process, and whether that is rounding (``task=parity``)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlmodule.core.errors import ConfigError, RLModuleError, TrainingError
from rlmodule.parity.compare import GRAD_NORM, LOSS, largest_of, metric_differences
from rlmodule.parity.layouts import REFERENCE, ParityLayout, chosen
from rlmodule.parity.ranks import REFERENCE_FILE, Outcome, run, session_for
from rlmodule.run.launchers.local import launched_from_outside
from rlmodule.run.session import Session
from rlmodule.run.settings import ParityConfig

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
FILE_NAME = "parity.json"
WIDTH = 110  # columns of the table in a log file
COLOURS = {PASS: "green", FAIL: "bold red", SKIP: "yellow"}


@dataclass(frozen=True)
class Verdict:
    """One row of the table.

    Args:
        name, title: of the layout.
        verdict: PASS, FAIL or SKIP.
        reason: why it failed or was skipped; empty otherwise.
        loss, grad_norm, parameters, metrics: largest relative differences to one process.
        worst_metric, worst_parameter: which of them is furthest off.
        seconds: of training.
        by_metric: difference of each metric.
    """

    name: str
    title: str
    verdict: str
    reason: str = ""
    loss: float | None = None
    grad_norm: float | None = None
    parameters: float | None = None
    metrics: float | None = None
    worst_metric: str = ""
    worst_parameter: str = ""
    seconds: float | None = None
    by_metric: dict[str, float] = field(default_factory=dict)


def prove(session: Session, console: Console | None = None) -> bool:
    """Compare every layout with one process; prints the table, writes ``parity.json``, returns whether none failed.

    Raises:
        ConfigError: started by torchrun or srun.
        TrainingError: one process alone cannot train, so there is nothing to compare with.
    """
    if launched_from_outside():
        raise ConfigError(
            key="task",
            got="parity",
            because="it starts processes of its own, and torchrun or srun has started this one",
            fix="Run python train.py task=parity by itself, in an allocation with the devices it needs",
        )
    console = console or (Console() if Console().is_terminal else Console(width=WIDTH))
    config, where = session.settings.parity, session.run_dir.root / FILE_NAME
    session.run_dir.root.mkdir(parents=True, exist_ok=True)
    try:
        verdicts = _verdicts(session, console)
    finally:
        (session.run_dir.root / REFERENCE_FILE).unlink(missing_ok=True)
    write(where, verdicts, config)
    console.print(table(verdicts, config))
    for v in verdicts:
        if v.reason:
            console.print(f"{v.verdict} {v.title}: {v.reason}", highlight=False, markup=False)
    count = {word: sum(v.verdict == word for v in verdicts) for word in (PASS, FAIL, SKIP)}
    console.print(f"{count[PASS]} passed, {count[FAIL]} failed, {count[SKIP]} skipped; {where}", highlight=False)
    return count[FAIL] == 0


def _verdicts(session: Session, console: Console) -> list[Verdict]:
    """Every layout after the other; the first one is what the others are compared with."""
    verdicts: list[Verdict] = []
    reference: Outcome | None = None
    for layout in chosen(session.settings.parity.layouts):
        console.print(f"parity: {layout.title} ...", highlight=False)
        cut = session_for(session, layout)
        reason = refusal(cut)
        if reason is not None:
            verdicts.append(Verdict(layout.name, layout.title, SKIP, reason))
            continue
        outcome = run(cut, is_reference=reference is None)
        if reference is None:
            if isinstance(outcome, str):
                raise TrainingError(f"parity: one process alone cannot train this model. {outcome}")
            reference = outcome
        verdicts.append(judge(layout, outcome, reference, session.settings.parity))
    return verdicts


def refusal(session: Session) -> str | None:
    """Why this machine, installation or model cannot run a layout, or None."""
    try:
        session.check_strategy()
    except RLModuleError as error:
        return str(error)
    return None


def judge(layout: ParityLayout, outcome: Outcome | str, reference: Outcome, config: ParityConfig) -> Verdict:
    """Hold what came out against the reference and the tolerances."""
    if isinstance(outcome, str):
        return Verdict(layout.name, layout.title, FAIL, outcome.strip())
    differences = metric_differences(outcome.steps, reference.steps)
    worst = max(differences, key=lambda name: differences[name])
    too_far = {name: d for name, d in differences.items() if not d <= config.tolerance}
    reasons = [f"{name} is off by {d:.1e} (tolerance {config.tolerance:.0e})" for name, d in too_far.items()]
    if not outcome.parameters <= config.parameter_tolerance:
        reasons.append(
            f"weight {outcome.worst_parameter} is off by {outcome.parameters:.1e} "
            f"(tolerance {config.parameter_tolerance:.0e})"
        )
    return Verdict(
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


def table(verdicts: list[Verdict], config: ParityConfig) -> Table:
    """For people; differences are relative, see ``compare.py``."""
    made = Table(
        title=f"{config.steps} optimizer steps: largest relative difference to one process",
        caption=f"tolerance {config.tolerance:.0e}, weights {config.parameter_tolerance:.0e}",
    )
    made.add_column("layout", no_wrap=True)
    for name in ("loss", "grad norm", "weights", "metrics", "seconds"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("")
    for v in verdicts:
        numbers = [_short(x) for x in (v.loss, v.grad_norm, v.parameters, v.metrics)]
        seconds = "" if v.seconds is None else f"{v.seconds:.1f}"
        made.add_row(v.title, *numbers, seconds, f"[{COLOURS[v.verdict]}]{v.verdict}[/]")
    return made


def _short(number: float | None) -> str:
    return "" if number is None else ("0" if number == 0 else f"{number:.1e}")


def write(path: Path, verdicts: list[Verdict], config: ParityConfig) -> None:
    """For programs."""
    content: dict[str, Any] = {"parity": asdict(config), "layouts": [asdict(v) for v in verdicts]}
    path.write_text(json.dumps(content, indent=1))
