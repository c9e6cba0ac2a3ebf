"""Numbers of an iteration and of a validation, computed from what every rank knows of every sample. Pure functions.

They are the same on every rank, but for times, which are this process's own. Leaves out when a number is taken and
where it goes (``callbacks/``), and what the whole run came to (``records/summary.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmodule.core.metrics import array_mean, array_std
from rlmodule.core.sample_metas import Bools, Ints
from rlmodule.experience.failures import drawn_last
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.sample_info import SampleInfo
from rlmodule.experience.sample_table import Floats, Numbers, SampleTable
from rlmodule.records.metrics_log import Elapsed

VALIDATE = "validate"  # phase of the clock that is no part of an iteration


@dataclass(frozen=True)
class RunTotals:
    """What a run has collected so far, over all ranks: iterations, samples, prompt and response tokens of them."""

    iteration: int = 0
    samples: int = 0
    tokens: int = 0

    def after(self, iteration: int, sample_info: Sequence[SampleInfo]) -> RunTotals:
        """The same once ``iteration`` has brought ``sample_info``."""
        counted = drawn_last(without_padding(sample_info))
        return RunTotals(iteration, self.samples + len(counted), self.tokens + int(counted.metas.length.sum()))


def iteration_metrics(
    iteration: Iteration,
    seconds: Mapping[str, float],
    elapsed: Mapping[str, Elapsed],
    totals_so_far: RunTotals,
    *,
    policy_version: int | None = None,
) -> dict[str, float]:
    """Everything that is logged once per iteration.

    Args:
        iteration: its samples over all ranks.
        seconds: wall clock by phase of collecting, from the stopwatch of the data module.
        elapsed: the clock of the iteration: ``collect``, ``update`` and perhaps ``validate``.
        totals_so_far: the run with this iteration counted in.
        policy_version: of the policy that began to train on it; None where it drew none of the samples.
    """
    tokens = int(without_padding(iteration.sample_info).metas.length.sum())
    drawn = drawn_last(iteration.sample_info)
    return {
        **reward_metrics(drawn),
        **length_metrics(drawn),
        **staleness_metrics(iteration.sample_info, policy_version),
        **advantage_metrics(iteration),
        **iteration.metrics,
        **time_metrics(seconds, elapsed, tokens),
        "progress/iteration": float(totals_so_far.iteration),
        "progress/samples": float(totals_so_far.samples),
        "progress/tokens": float(totals_so_far.tokens),
    }


def reward_metrics(sample_info: Sequence[SampleInfo]) -> dict[str, float]:
    """``reward/*``; NaN where nothing was scored.

    Responses without a finite reward are counted in ``reward/unscored`` and leave everything else. ``zero_std_groups``
    is the share of groups, among those with a scored response, whose rewards are all equal. A component or diagnostic
    of the reward that has the name of one of these, or of what the reward counts, is logged as ``reward/<name>_part``.
    """
    counted = without_padding(sample_info)
    scored = counted.where(counted.is_scored)
    metrics = {
        "reward/mean": array_mean(scored.reward),
        "reward/std": array_std(scored.reward),
        "reward/min": float(scored.reward.min()) if scored else math.nan,
        "reward/max": float(scored.reward.max()) if scored else math.nan,
        "reward/unscored": float(len(counted) - len(scored)),
        "reward/zero_std_groups": array_mean(_all_equal(scored.reward, scored.metas.group_id)),
    }
    taken = {*metrics, *(f"reward/{name}" for name, column in counted.counts.items() if column.present.any())}
    for name in sorted({*scored.diagnostics, *scored.parts}):
        values = _first_of(scored.parts.get(name), scored.diagnostics.get(name))
        key = f"reward/{name}" if f"reward/{name}" not in taken else f"reward/{name}_part"
        metrics |= {key: array_mean(values)} if len(values) else {}
    return metrics


def _all_equal(reward: Floats, group: Ints) -> Bools:
    """[n] rewards and their groups -> for each group whether its rewards are all equal."""
    if not len(reward):
        return np.zeros(0, bool)
    if (group[1:] < group[:-1]).any():
        by_group = np.argsort(group, kind="stable")
        reward, group = reward[by_group], group[by_group]
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    is_equal: Bools = np.minimum.reduceat(reward, starts) == np.maximum.reduceat(reward, starts)
    return is_equal


def _first_of(first: Numbers | None, second: Numbers | None) -> Floats:
    """The numbers of ``first``, and of ``second`` for the samples that have none there."""
    if first is None or second is None:
        found = first or second
        return np.zeros(0) if found is None else found.there
    both = Numbers(np.where(first.present, first.values, second.values), first.present | second.present)
    return both.there


def length_metrics(sample_info: Sequence[SampleInfo]) -> dict[str, float]:
    """``response_length/*`` and ``prompt_length/*`` in tokens per sample; ``clip_ratio`` is the share that was cut.

    A sample that failed has no say in it, since how far it got depends on when it failed, nor one that is too old.
    """
    counted = without_padding(sample_info)
    counted = counted.where(~counted.failed & ~counted.is_stale)
    return {
        **min_mean_max("response_length", counted.metas.response_len),
        "response_length/clip_ratio": array_mean(counted.truncated),
        **min_mean_max("prompt_length", counted.metas.prompt_len),
    }


def staleness_metrics(sample_info: Sequence[SampleInfo], policy_version: int | None = None) -> dict[str, float]:
    """``rollout/staleness/*``: iterations since the oldest token of a response was drawn; nothing where all are new.

    Args:
        sample_info: of the samples that are trained on, those too old among them.
        policy_version: as in ``iteration_metrics``; None for the newest of the samples.
    """
    counted = without_padding(sample_info)
    newest = counted.version.max(initial=0) if policy_version is None else policy_version
    ages = newest - counted.version
    if not ages.any():
        return {}
    return {
        "rollout/staleness/mean": array_mean(ages),
        "rollout/staleness/max": float(ages.max()),
        "rollout/staleness/replayed": array_mean(counted.is_replayed),
        "rollout/staleness/mixed": array_mean(counted.is_mixed),
    }


def advantage_metrics(iteration: Iteration) -> dict[str, float]:
    """``advantage/*`` over scored responses; nothing where the loss needs no advantage."""
    return {} if iteration.advantages is None else min_mean_max("advantage", scored_advantages(iteration))


def scored_advantages(iteration: Iteration) -> Floats:
    """[n] advantage of every scored response that has one, by sample id; empty where the loss needs none."""
    if iteration.advantages is None:
        return np.zeros(0)
    info, advantage = SampleTable.of(iteration.sample_info), iteration.advantages.numpy()
    has_none = np.isnan(advantage) & (info.metas.loss_tokens == 0)  # a mean over the tokens of none
    scored: Floats = advantage[info.is_scored & ~info.metas.is_padding & ~has_none]
    return scored


def time_metrics(seconds: Mapping[str, float], elapsed: Mapping[str, Elapsed], tokens: int) -> dict[str, float]:
    """``timing_s/*`` wall and ``cpu_s/*`` CPU seconds, and ``perf/tokens_per_s`` over the iteration's wall clock."""
    phases = {phase: spent for phase, spent in elapsed.items() if phase != VALIDATE}
    whole = math.fsum(spent.seconds for spent in phases.values())
    return {
        **{f"timing_s/{phase}": value for phase, value in seconds.items()},
        "timing_s/update": phases["update"].seconds if "update" in phases else 0.0,
        "timing_s/iteration": whole,
        **{f"cpu_s/{phase}": spent.cpu_seconds for phase, spent in phases.items()},
        "perf/tokens_per_s": tokens / whole if whole > 0 else math.nan,
    }


def without_padding(sample_info: Sequence[SampleInfo]) -> SampleTable:
    """The samples that count."""
    table = SampleTable.of(sample_info)
    return table.where(~table.metas.is_padding)


def min_mean_max(name: str, values: NDArray[Any]) -> dict[str, float]:
    """Mean, largest and smallest of [n] numbers; NaN of nothing."""
    return {
        f"{name}/mean": array_mean(values),
        f"{name}/max": float(values.max()) if len(values) else math.nan,
        f"{name}/min": float(values.min()) if len(values) else math.nan,
    }
