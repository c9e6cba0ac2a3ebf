"""Numbers of an iteration and of a validation, computed from what every rank knows of every sample. Pure functions.

They are the same on every rank, but for times, which are this process's own. Leaves out when a number is taken and
where it goes (``callbacks/``), and what the whole run came to (``records/summary.py``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmodule.experience.facts import SampleFacts
from rlmodule.experience.iteration import Iteration
from rlmodule.records.journal import Lap
from rlmodule.records.summary import mean, standard_deviation

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


def _reward(fact: SampleFacts) -> float:
    assert fact.reward is not None, "only scored samples have a reward"
    return float(fact.reward)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": mean(values),
        f"{name}/max": max(values, default=math.nan),
        f"{name}/min": min(values, default=math.nan),
    }
