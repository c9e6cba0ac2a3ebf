"""Results of a whole run, computed from its metrics log. Pure functions.

Leaves out when a number is logged and who shows it (``callbacks/``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rlmodule.core.metrics import CI_HIGH, CI_LOW, mean
from rlmodule.records.metrics_log import Record

REWARD, ACCURACY = "val/reward/mean", "val/accuracy"  # one number: accuracy where every reward is 0 or 1
PAIR_ACCURACY, LOSS = "val/pair_accuracy", "val/loss"
# What runs are compared by, the first that was measured -> whether more is better.
HELD_OUT: Mapping[str, bool] = {REWARD: True, PAIR_ACCURACY: True, LOSS: False}
COLLAPSED, WORSE = "collapsed", "worse"  # see HeldOut.loss
ENDS = ("start", "end")
NOTHING = 0.1  # share of the best held-out reward below which nothing is left of it


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
    """One line of the table at the end, formatted: a metric at the start and at the end of the run.

    ``best`` is the best value of a number that is measured on held-out rows; empty for others.
    """

    label: str
    start: str
    end: str
    best: str = ""


# metric -> (label, format), in the order of the table. The size of a policy loss means nothing, so it is left out.
CHANGES: Mapping[str, tuple[str, str]] = {
    ACCURACY: ("held-out accuracy", ".3f"),
    REWARD: ("held-out reward", ".3f"),
    PAIR_ACCURACY: ("held-out pair accuracy", ".3f"),
    "reward/mean": ("mean reward", ".3f"),
    "response_length/mean": ("response length, tokens", ".1f"),
    "actor/entropy": ("entropy, nats per token", ".3f"),
    "perf/tokens_per_s": ("tokens per second", ",.0f"),
    "timing_s/iteration": ("seconds per iteration", ".2f"),
}
CHANGES_WITHOUT_REWARD = {
    LOSS: ("held-out loss", ".4f"),
    "actor/loss": ("loss", ".4f"),
    "reward_model/loss": ("loss", ".4f"),
    "actor/pair_accuracy": ("pair accuracy", ".3f"),
    "reward_model/pair_accuracy": ("pair accuracy", ".3f"),
    **CHANGES,
}


def changes(records: Sequence[Record]) -> list[Change]:
    """First, best and last value of the main metrics; those that were never logged are left out.

    The held-out reward is shown as accuracy where every validation of the run was one.
    """
    shown = CHANGES if names(records, "reward/") else CHANGES_WITHOUT_REWARD
    twice = REWARD if len(series(records, ACCURACY)[0]) == len(series(records, REWARD)[0]) else ACCURACY
    lines = []
    for metric, (label, form) in shown.items():
        values = series(records, metric)[1]
        if values and metric != twice:
            best = format(max(values), form) if metric.startswith("val/") else ""
            best = format(min(values), form) if metric == LOSS else best
            lines.append(Change(label, format(values[0], form), format(values[-1], form), best))
    return lines


@dataclass(frozen=True)
class HeldOut:
    """What a run came to on held-out rows, by the number that runs are compared by.

    Args:
        metric: its name.
        higher_is_better: whether more of it is better.
        start, best, end: its first, best and last value.
        best_iteration: iterations trained when it was best, the first of equals; 0 for the policy that a run starts
            from.
        loss: how the end compares with the start and the best: ``""`` (no worse, as far as can be told), ``worse``
            (clearly worse than the start) or ``collapsed`` (nothing is left).
    """

    metric: str
    higher_is_better: bool
    start: float
    best: float
    end: float
    best_iteration: int
    loss: str

    @property
    def name(self) -> str:
        """In words."""
        return {REWARD: "held-out reward", PAIR_ACCURACY: "held-out pair accuracy", LOSS: "held-out loss"}[self.metric]

    def is_as_good_as_start(self, value: float) -> bool:
        """Whether a value of this number is no worse than that of the start."""
        return value >= self.start if self.higher_is_better else value <= self.start


def held_out(records: Sequence[Record]) -> HeldOut | None:
    """What the run came to on held-out rows; None where nothing was measured."""
    for metric, higher_is_better in HELD_OUT.items():
        found = [r for r in records if math.isfinite(r.metrics.get(metric, math.nan))]
        if found:
            sign = 1.0 if higher_is_better else -1.0
            best = max(found, key=lambda record: sign * record.metrics[metric])
            return HeldOut(
                metric=metric,
                higher_is_better=higher_is_better,
                start=found[0].metrics[metric],
                best=best.metrics[metric],
                end=found[-1].metrics[metric],
                best_iteration=best.iteration,
                loss=_what_was_lost(metric, found[0], best, found[-1]),
            )
    return None


def _what_was_lost(metric: str, start: Record, best: Record, end: Record) -> str:
    """See ``HeldOut.loss``; where the number has intervals, they have to lie apart."""

    if not HELD_OUT[metric]:
        return WORSE if end.metrics[metric] > start.metrics[metric] else ""
    if metric + CI_LOW not in end.metrics or metric + CI_LOW not in start.metrics:
        return ""
    most, high = best.metrics[metric], end.metrics[metric + CI_HIGH]
    if most > 0 and end.metrics[metric] < NOTHING * most and high < best.metrics.get(metric + CI_LOW, most):
        return COLLAPSED
    return WORSE if high < start.metrics[metric + CI_LOW] else ""


def first_and_last(records: Iterable[Record], name: str) -> tuple[float | None, float | None]:
    """A metric's first and last finite value; None if there is none."""
    values = series(records, name)[1]
    return (values[0], values[-1]) if values else (None, None)


def run_totals(records: Sequence[Record]) -> dict[str, object]:
    """For ``summary.json``: quality at the start and the end, work done, seconds by phase.

    Seconds are those of the first process and include the time before a resume; ``other`` is waiting and work between
    the phases.
    """
    reward, result = first_and_last(records, "reward/mean"), held_out(records)
    measured = {"reward": REWARD, "accuracy": ACCURACY, "pair_accuracy": PAIR_ACCURACY, "loss": LOSS}
    ends = {name: first_and_last(records, metric) for name, metric in measured.items()}
    iterations = [r for r in records if r.kind == "iteration"]
    return {
        "held_out": None if result is None else asdict(result),
        **{f"val_{name}_{end}": value for name, of in ends.items() for end, value in zip(ENDS, of, strict=True)},
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
