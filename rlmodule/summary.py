"""Facts -> numbers: metrics of an iteration and of a validation, and what the whole run came to. Pure functions.

Facts are the same on every rank, so these numbers are too, but for times, which are this process's own. Leaves out
when a number is taken and where it goes (``callbacks/``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlmodule.experience.facts import SampleFacts
from rlmodule.experience.iteration import Iteration
from rlmodule.journal import Lap, Record

VALIDATE = "validate"  # phase of the clock that is no part of an iteration


@dataclass(frozen=True)
class Tally:
    """What a run has collected so far, over all ranks: iterations, samples, prompt and response tokens of them."""

    iteration: int = 0
    samples: int = 0
    tokens: int = 0

    def after(self, iteration: int, facts: Sequence[SampleFacts]) -> Tally:
        """The same once ``iteration`` has brought ``facts``."""
        counted = drawn_last(without_padding(facts))
        return Tally(iteration, self.samples + len(counted), self.tokens + sum(f.meta.length for f in counted))


def iteration_metrics(
    iteration: Iteration, seconds: Mapping[str, float], laps: Mapping[str, Lap], tally: Tally
) -> dict[str, float]:
    """Everything that is logged once per iteration.

    Args:
        iteration: its samples over all ranks.
        seconds: wall clock by phase of collecting, from the stopwatch of the data module.
        laps: the clock of the iteration: ``collect``, ``update`` and perhaps ``validate``.
        tally: the run with this iteration counted in.
    """
    tokens = sum(f.meta.length for f in without_padding(iteration.facts))
    drawn = drawn_last(iteration.facts)
    return {
        **reward_metrics(drawn),
        **length_metrics(drawn),
        **staleness_metrics(iteration.facts),
        **advantage_metrics(iteration),
        **iteration.metrics,
        **time_metrics(seconds, laps, tokens),
        "progress/iteration": float(tally.iteration),
        "progress/samples": float(tally.samples),
        "progress/tokens": float(tally.tokens),
    }


def reward_metrics(facts: Sequence[SampleFacts]) -> dict[str, float]:
    """``reward/*``; NaN where nothing was scored.

    Responses without a finite reward are counted in ``reward/unscored`` and leave everything else. ``flat_groups`` is
    the share of groups, among those with a scored response, whose rewards are all equal. A component of the reward
    that has the name of one of these is logged as ``reward/<component>_part``.
    """
    counted = without_padding(facts)
    scored = [f for f in counted if is_scored(f)]
    groups: dict[int, list[float]] = defaultdict(list)
    for fact in scored:
        groups[fact.meta.group_id].append(_reward(fact))
    rewards = [_reward(f) for f in scored]
    metrics = {
        "reward/mean": mean(rewards),
        "reward/std": standard_deviation(rewards),
        "reward/min": min(rewards, default=math.nan),
        "reward/max": max(rewards, default=math.nan),
        "reward/unscored": float(len(counted) - len(scored)),
        "reward/flat_groups": mean([float(min(group) == max(group)) for group in groups.values()]),
    }
    parts: dict[str, list[float]] = defaultdict(list)
    for fact in scored:
        for name, value in fact.parts.items():
            parts[name].append(value)
    for name in sorted(parts):
        key = f"reward/{name}" if f"reward/{name}" not in metrics else f"reward/{name}_part"
        metrics[key] = mean(parts[name])
    return metrics


def length_metrics(facts: Sequence[SampleFacts]) -> dict[str, float]:
    """``response_length/*`` and ``prompt_length/*`` in tokens per sample; ``clip_ratio`` is the share that was cut."""
    counted = without_padding(facts)
    return {
        **_spread("response_length", [float(f.meta.response_len) for f in counted]),
        "response_length/clip_ratio": mean([float(f.truncated) for f in counted]),
        **_spread("prompt_length", [float(f.meta.prompt_len) for f in counted]),
    }


def staleness_metrics(facts: Sequence[SampleFacts]) -> dict[str, float]:
    """``rollout/staleness/*``, in iterations since a response was drawn; nothing where all were drawn by one policy."""
    counted = without_padding(facts)
    newest = max((f.version for f in counted), default=0)
    ages = [float(newest - f.version) for f in counted]
    if not any(ages):
        return {}
    replayed = mean([float(age > 0) for age in ages])
    return {
        "rollout/staleness/mean": mean(ages),
        "rollout/staleness/max": max(ages),
        "rollout/staleness/replayed": replayed,
    }


def advantage_metrics(iteration: Iteration) -> dict[str, float]:
    """``advantage/*`` over scored responses; nothing where the loss needs no advantage."""
    return {} if iteration.advantages is None else _spread("advantage", scored_advantages(iteration))


def scored_advantages(iteration: Iteration) -> list[float]:
    """Advantage of every scored response, by sample id; empty where the loss needs none."""
    if iteration.advantages is None:
        return []
    pairs = zip(iteration.facts, iteration.advantages.tolist(), strict=True)
    return [advantage for fact, advantage in pairs if is_scored(fact) and not fact.meta.is_padding]


def time_metrics(seconds: Mapping[str, float], laps: Mapping[str, Lap], tokens: int) -> dict[str, float]:
    """``timing_s/*`` wall and ``cpu_s/*`` CPU seconds, and ``perf/tokens_per_s`` over the iteration's wall clock."""
    phases = {phase: lap for phase, lap in laps.items() if phase != VALIDATE}
    whole = math.fsum(lap.seconds for lap in phases.values())
    return {
        **{f"timing_s/{phase}": value for phase, value in seconds.items()},
        "timing_s/update": phases["update"].seconds if "update" in phases else 0.0,
        "timing_s/iteration": whole,
        **{f"cpu_s/{phase}": lap.cpu_seconds for phase, lap in phases.items()},
        "perf/tokens_per_s": tokens / whole if whole > 0 else math.nan,
    }


def answer_metrics(facts: Sequence[SampleFacts]) -> dict[str, float]:
    """``val/*`` of greedy answers to held-out prompts; ``val/accuracy`` is the mean reward of those scored."""
    scored = [_reward(f) for f in facts if is_scored(f)]
    return {
        "val/accuracy": mean(scored),
        "val/response_length": mean([float(f.meta.response_len) for f in facts]),
        "val/unscored": float(len(facts) - len(scored)),
    }


def is_scored(fact: SampleFacts) -> bool:
    """Whether the reward says anything about this response."""
    return fact.reward is not None and math.isfinite(fact.reward)


def drawn_last(facts: Sequence[SampleFacts]) -> list[SampleFacts]:
    """The samples of the newest policy; all of them where none is trained on again."""
    newest = max((f.version for f in facts), default=0)
    return [f for f in facts if f.version == newest]


def without_padding(facts: Sequence[SampleFacts]) -> list[SampleFacts]:
    """The samples that count."""
    return [f for f in facts if not f.meta.is_padding]


def mean(values: Sequence[float]) -> float:
    """Mean, summed exactly; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def standard_deviation(values: Sequence[float]) -> float:
    """Population standard deviation (divides by the count); NaN of nothing."""
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values])) if values else math.nan


def _reward(fact: SampleFacts) -> float:
    assert fact.reward is not None, "only scored samples have a reward"
    return float(fact.reward)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": mean(values),
        f"{name}/max": max(values, default=math.nan),
        f"{name}/min": min(values, default=math.nan),
    }


# The run as a whole


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
    """One line of the table at the end: a metric when the run began and when it ended, in words."""

    label: str
    start: str
    end: str


# metric -> (label, form), in the order of the table. A policy loss says nothing by its size, so it is not among them.
CHANGES: Mapping[str, tuple[str, str]] = {
    "val/accuracy": ("held-out accuracy", ".3f"),
    "val/pair_accuracy": ("held-out pairs told apart", ".3f"),
    "reward/mean": ("mean reward", ".3f"),
    "response_length/mean": ("response length, tokens", ".1f"),
    "actor/entropy": ("entropy, nats per token", ".3f"),
    "perf/tokens_per_s": ("tokens per second", ",.0f"),
    "timing_s/iteration": ("seconds per iteration", ".2f"),
}
CHANGES_WITHOUT_REWARD = {
    "actor/loss": ("loss", ".4f"),
    "reward_model/loss": ("loss", ".4f"),
    "actor/pair_accuracy": ("pairs told apart", ".3f"),
    "reward_model/pair_accuracy": ("pairs told apart", ".3f"),
    **CHANGES,
}


def changes(records: Sequence[Record]) -> list[Change]:
    """First and last value of the metrics a person asks about, those never seen left out."""
    asked = CHANGES if names(records, "reward/") else CHANGES_WITHOUT_REWARD
    found = [(label, form, *first_and_last(records, metric)) for metric, (label, form) in asked.items()]
    return [
        Change(label, format(start, form), format(end, form))
        for label, form, start, end in found
        if start is not None and end is not None
    ]


def first_and_last(records: Iterable[Record], name: str) -> tuple[float | None, float | None]:
    """A metric's first and last finite value; None where there is none."""
    values = series(records, name)[1]
    return (values[0], values[-1]) if values else (None, None)


def run_totals(records: Sequence[Record]) -> dict[str, object]:
    """What the run came to, for ``summary.json``: quality at both ends, work done, seconds by phase.

    Seconds are those of the first process, from before a resume too; ``other`` is waiting and work between the phases.
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
