"""What several runs have in common and where they differ, read from their directories. Pure reading and arithmetic.

Leaves out how it is shown (``comparison_tables.py``, ``comparison_chart.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.records.metrics_log import Record, read_records
from rlmodule.records.run_directory import RunDirectory
from rlmodule.records.summary import series
from rlmodule.run.build.provenance import flat, name_of_overrides
from rlmodule.run.saved.saved_settings import OF_THE_OCCASION, read_saved_config

# Shown where a run has them and nothing is asked for: what is held out, then what is trained on.
MAIN_METRICS = (
    *("val/accuracy", "val/reward", "val/reward/mean", "val/pair_accuracy", "val/loss"),
    *("reward/mean", "actor/loss", "actor/entropy", "response_length/mean"),
)
HELD_OUT_OR_REWARD = 6  # of them; the others are shown where a run has none of these
LESS_IS_BETTER = ("loss", "perplexity", "kl")  # in the last part of a metric's name
BARS = "▁▂▃▄▅▆▇█"
UNSET = "-"
WHERE = {*OF_THE_OCCASION} - {"trainer", "strategy", "callbacks"}  # where a run writes, not what it does


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """One run, as its directory tells it.

    Args:
        root: the directory.
        name: shown for it.
        settings: dotted key -> value.
        records: its metrics.
        summary: written when it ended; empty before.
    """

    root: Path
    name: str
    settings: Mapping[str, object]
    records: Sequence[Record]
    summary: Mapping[str, Any]

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """(steps, finite values) of one metric."""
        return series(self.records, metric)

    @property
    def ended(self) -> str:
        """How far it came."""
        if not self.summary:
            return "running or killed"
        return "finished" if self.summary.get("finished") else "stopped"


@dataclass(frozen=True)
class Numbers:
    """First, best and last value of a metric, and the step of the best; None where it was never logged."""

    first: float | None = None
    best: float | None = None
    best_step: int | None = None
    last: float | None = None


def find_runs(places: Sequence[Path]) -> list[ComparedRun]:
    """The runs that the places are, or that lie below them, each once, in the order given.

    Raises:
        ConfigError: a place is none and holds none.
    """
    roots: dict[Path, None] = {}
    for place in places:
        found = [place.absolute()] if RunDirectory(place).config.is_file() else _below(place.absolute())
        if not found:
            raise ConfigError(
                key="command.runs",
                got=place,
                because="no run has written there" if place.exists() else "there is nothing there",
                fix="Give run directories, or folders that hold some",
            )
        roots |= dict.fromkeys(found)
    return [_read(root) for root in roots]


def _below(place: Path) -> list[Path]:
    """Every run below a folder; jobs of a sweep in the order of their numbers."""
    found = (path.parent for path in place.rglob("config.yaml") if (path.parent / "command.txt").is_file())
    return sorted(found, key=lambda root: [(len(p), p) if p.isdigit() else (0, p) for p in root.parts])


def _read(root: Path) -> ComparedRun:
    directory = RunDirectory(root)
    saved = OmegaConf.to_container(read_saved_config(root), resolve=False)
    assert isinstance(saved, dict), "a configuration is a mapping"
    settings = flat({str(name): value for name, value in saved.items() if name not in WHERE})
    try:
        summary = json.loads(directory.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    name = str(saved.get("name") or name_of_overrides(saved.get("overrides") or []) or root.name)
    records = read_records(root / "metrics.jsonl")
    return ComparedRun(root, name, settings, records, summary if isinstance(summary, dict) else {})


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Dotted key -> its value in each run, of the keys that are not the same in all."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = {key: [str(run.settings.get(key, UNSET)) for run in runs] for key in sorted(keys)}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def chosen_metrics(runs: Sequence[ComparedRun], wanted: Sequence[str]) -> list[str]:
    """The metrics to show: those asked for, or the main ones that a run has.

    Raises:
        ConfigError: no run has logged one that is asked for.
    """
    known = {name for run in runs for record in run.records for name in record.metrics}
    for name in wanted:
        if name not in known:
            raise ConfigError(
                key="command.metrics",
                got=name,
                because="no run has logged such a metric",
                fix=did_you_mean(name, known),
            )
    if wanted:
        return list(wanted)
    first = [name for name in MAIN_METRICS[:HELD_OUT_OR_REWARD] if name in known]
    return first or [name for name in MAIN_METRICS[HELD_OUT_OR_REWARD:] if name in known]


def numbers_of(run: ComparedRun, metric: str) -> Numbers:
    """First, best and last value of a metric of one run."""
    steps, values = run.series(metric)
    if not values:
        return Numbers()
    least = any(word in metric.rpartition("/")[2] for word in LESS_IS_BETTER)
    best = min(values) if least else max(values)
    return Numbers(values[0], best, steps[values.index(best)], values[-1])


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """A curve as ``width`` characters at most: the mean of each stretch, between ``low`` and ``high``."""
    count = min(width, len(values))
    cuts = [len(values) * place // count for place in range(count + 1)] if count else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    scale = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / scale * len(BARS)))] for mean in means)
