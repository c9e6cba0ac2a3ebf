"""Results of a whole run, computed from its metrics log. Pure functions.

Leaves out when a number is logged and who shows it (``callbacks/``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlmodule.records.metrics_log import Record


def mean(values: Sequence[float]) -> float:
    """Mean, summed exactly; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def standard_deviation(values: Sequence[float]) -> float:
    """Population standard deviation (divides by the count); NaN of nothing."""
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values])) if values else math.nan


def series(records: Iterable[Record], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, finite values only: a curve."""
    points = [(r.step, r.metrics[name]) for r in records if name in r.metrics]
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in finite], [value for _, value in finite]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to ``width - 1`` before it."""
    return [mean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def total(records: Iterable[Record], name: str) -> float:
    """Sum of one metric over the run."""
    return math.fsum(series(records, name)[1])


@dataclass(frozen=True)
class Change:
    """One line of the table at the end: a metric at the start and at the end of the run, formatted."""

    label: str
    start: str
    end: str


# metric -> (label, format), in the order of the table. The size of a policy loss means nothing, so it is left out.
CHANGES: Mapping[str, tuple[str, str]] = {
    "val/accuracy": ("held-out accuracy", ".3f"),
    "val/pair_accuracy": ("held-out pair accuracy", ".3f"),
    "reward/mean": ("mean reward", ".3f"),
    "response_length/mean": ("response length, tokens", ".1f"),
    "actor/entropy": ("entropy, nats per token", ".3f"),
    "perf/tokens_per_s": ("tokens per second", ",.0f"),
    "timing_s/iteration": ("seconds per iteration", ".2f"),
}
CHANGES_WITHOUT_REWARD = {
    "actor/loss": ("loss", ".4f"),
    "reward_model/loss": ("loss", ".4f"),
    "actor/pair_accuracy": ("pair accuracy", ".3f"),
    "reward_model/pair_accuracy": ("pair accuracy", ".3f"),
    **CHANGES,
}


def changes(records: Sequence[Record]) -> list[Change]:
    """First and last value of the main metrics; those that were never logged are left out."""
    shown = CHANGES if names(records, "reward/") else CHANGES_WITHOUT_REWARD
    found = [(label, form, *first_and_last(records, metric)) for metric, (label, form) in shown.items()]
    return [
        Change(label, format(start, form), format(end, form))
        for label, form, start, end in found
        if start is not None and end is not None
    ]


def first_and_last(records: Iterable[Record], name: str) -> tuple[float | None, float | None]:
    """A metric's first and last finite value; None if there is none."""
    values = series(records, name)[1]
    return (values[0], values[-1]) if values else (None, None)


def run_totals(records: Sequence[Record]) -> dict[str, object]:
    """For ``summary.json``: quality at the start and the end, work done, seconds by phase.

    Seconds are those of the first process and include the time before a resume; ``other`` is waiting and work between
    the phases.
    """
    accuracy, reward = first_and_last(records, "val/accuracy"), first_and_last(records, "reward/mean")
    of_pairs = first_and_last(records, "val/pair_accuracy")
    iterations = [r for r in records if r.kind == "iteration"]
    return {
        "val_accuracy_start": accuracy[0],
        "val_accuracy_end": accuracy[1],
        "val_pair_accuracy_start": of_pairs[0],
        "val_pair_accuracy_end": of_pairs[1],
        "reward_mean_first": reward[0],
        "reward_mean_last": reward[1],
        "iterations": int(last(iterations, "progress/iteration")),
        "samples": int(last(iterations, "progress/samples")),
        "tokens": int(last(iterations, "progress/tokens")),
        "wall_seconds": wall_seconds(records),
        "cpu_seconds": _with_total({name.split("/")[1]: total(records, name) for name in names(records, "cpu_s/")}),
    }


def wall_seconds(records: Sequence[Record]) -> dict[str, float]:
    """Phase -> seconds over the whole run, and ``total`` of iterations and validations."""
    by_phase = {name.split("/")[1]: total(records, name) for name in names(records, "timing_s/")}
    iterations = by_phase.pop("iteration", 0.0)
    inside = math.fsum(value for phase, value in by_phase.items() if phase != "validation")
    return _with_total({**by_phase, "other": max(0.0, iterations - inside)})


def names(records: Iterable[Record], prefix: str) -> list[str]:
    """Metrics that begin with ``prefix``, sorted."""
    return sorted({name for record in records for name in record.metrics if name.startswith(prefix)})


def last(records: Iterable[Record], name: str, otherwise: float = 0.0) -> float:
    """A metric's last finite value."""
    values = series(records, name)[1]
    return values[-1] if values else otherwise


def _with_total(seconds: Mapping[str, float]) -> dict[str, float]:
    return {"total": math.fsum(seconds.values()), **seconds}
