"""Numbers of an evaluation from the answers of all ranks: mean reward, components, pass@k, by set and source. Pure.

``val/reward/mean`` is always there. ``val/accuracy`` is the same number, logged where every reward is 0 or 1.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from rlmodule.core.evaluations import EvaluatedAnswer
from rlmodule.core.metrics import CI_HIGH, CI_LOW, mean
from rlmodule.evaluation import VALIDATION
from rlmodule.evaluation.estimates import bootstrap_interval, majority_reward, pass_at_k, powers_of_two

Group = Sequence[EvaluatedAnswer]


def answer_metrics(answers: Group, n: int, seed: int) -> dict[str, float]:
    """``val/*`` over all answers; where they come from several sets or sources, ``val/<set>/<source>/*`` of each too.

    Args:
        answers: of all ranks, by sample id.
        n: answers per prompt.
        seed: of the intervals.
    """
    metrics = metrics_of(VALIDATION, answers, n, seed)
    for name, some in subsets(answers):
        metrics |= metrics_of(f"{VALIDATION}/{name}", some, n, seed)
    return metrics


def subsets(answers: Group) -> Iterator[tuple[str, Group]]:
    """(name, its answers) of each validation set if there are several, and of each source in one that has several."""
    by_set = _grouped(answers, lambda answer: answer.dataset)
    for name, of_set in by_set.items():
        if len(by_set) > 1:
            yield name, of_set
        by_source = _grouped(of_set, lambda answer: answer.source)
        if len(by_source) > 1:
            for source, some in by_source.items():
                yield "/".join(part for part in (name, source or "unnamed") if part), some


def metrics_of(prefix: str, answers: Group, n: int, seed: int) -> dict[str, float]:
    """``<prefix>/*`` of some answers; unscored ones are counted and leave everything else.

    Every reward per prompt has a 95 % interval over prompts beside it, ``/ci95_low`` and ``/ci95_high``.
    """
    scored = [answer for answer in answers if is_scored(answer)]
    is_binary = bool(scored) and all(answer.reward in (0.0, 1.0) for answer in scored)
    prompts = list(_grouped(scored, lambda answer: str(answer.prompt_id)).values())
    per_prompt = {"reward/mean": [mean(_rewards(group)) for group in prompts]}
    if n > 1:
        per_prompt |= {f"mean@{n}": per_prompt["reward/mean"]} | _of_several(prompts, n, is_binary=is_binary)
    metrics: dict[str, float] = {}
    for name, values in per_prompt.items():
        low, high = bootstrap_interval(values, seed)
        metrics |= {f"{prefix}/{name}": mean(values)}
        metrics |= {f"{prefix}/{name}{CI_LOW}": low, f"{prefix}/{name}{CI_HIGH}": high}
    if is_binary:
        metrics[f"{prefix}/accuracy"] = metrics[f"{prefix}/reward/mean"]
    metrics |= {f"{prefix}/reward/{name}": value for name, value in _components(answers).items()}
    metrics[f"{prefix}/response_length"] = mean([float(answer.num_tokens) for answer in answers])
    metrics[f"{prefix}/clip_ratio"] = mean([float(answer.finish_reason == "length") for answer in answers])
    metrics[f"{prefix}/unscored"] = float(len(answers) - len(scored))
    return metrics


def _of_several(prompts: Sequence[Group], n: int, *, is_binary: bool) -> dict[str, list[float]]:
    """Name -> one number per prompt, of several answers to each."""
    values = {f"best@{n}": [max(_rewards(group)) for group in prompts]}
    if is_binary:
        counts = [(len(group), sum(reward == 1.0 for reward in _rewards(group))) for group in prompts]
        for k in powers_of_two(n):  # a prompt with fewer scored answers than k says nothing of it
            values[f"pass@{k}"] = [pass_at_k(size, right, k) for size, right in counts if size >= k]
    if any(answer.extracted is not None for group in prompts for answer in group):
        values[f"maj@{n}"] = [majority_reward([a.extracted for a in group], _rewards(group)) for group in prompts]
    return values


def _components(answers: Group) -> dict[str, float]:
    """Mean over scored answers of what the reward says beside its value, and the sum of what it counts.

    One that is called as a number of ours is logged as ``<name>_part``.
    """
    values: Mapping[str, list[float]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for answer in answers:
        counts.update(answer.counts)
        for name, value in {**answer.diagnostics, **answer.parts}.items() if is_scored(answer) else ():
            values[name].append(value)
    taken = {"mean", *counts}
    means = {f"{name}_part" if name in taken else name: mean(values[name]) for name in sorted(values)}
    return means | {name: float(count) for name, count in sorted(counts.items())}


def is_scored(answer: EvaluatedAnswer) -> bool:
    """Whether its reward is a number."""
    return answer.reward is not None and math.isfinite(answer.reward)


def _rewards(group: Group) -> list[float]:
    return [float(answer.reward) for answer in group if answer.reward is not None]


def _grouped(answers: Group, key: Callable[[EvaluatedAnswer], str]) -> dict[str, list[EvaluatedAnswer]]:
    """The answers by key, in the order in which keys come first."""
    groups: dict[str, list[EvaluatedAnswer]] = {}
    for answer in answers:
        groups.setdefault(key(answer), []).append(answer)
    return groups
