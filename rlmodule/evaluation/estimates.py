"""What several answers per prompt say of a policy: pass@k, majority, and intervals over prompts. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 1000  # of an interval; the 25 outermost on either side are beyond it, so its ends are stable to a percent
LEVEL = 0.95


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that ``k`` answers drawn without replacement from ``n``, of which ``c`` are right, hold a right one.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al., arXiv:2107.03374.
    """
    assert 0 <= c <= n and 1 <= k <= n, f"{k} of {n} answers, {c} right"
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and ``most`` itself."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def majority_reward(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """Reward of the answer given most often; the mean over answers that are given equally often.

    Args:
        answers: [n] the answer in each response; None where there is none, which is no vote.
        rewards: [n] of each response; those of an answer are averaged.

    Returns:
        The expected reward where ties are broken at random; the mean reward where nothing is voted for.
    """
    by_answer: dict[str, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            by_answer.setdefault(answer, []).append(reward)
    most = max(map(len, by_answer.values()), default=0)
    tied = [votes for votes in by_answer.values() if len(votes) == most] or [list(rewards)]
    return math.fsum(math.fsum(votes) / len(votes) for votes in tied) / len(tied)


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean over prompts (Efron and Tibshirani, 1993, chapter 13).

    Args:
        values: [P] one number per prompt, all finite.
        seed: keys the resamples, so that the same values have the same interval.

    Returns:
        (low, high); NaN without values. It is empty where all values are equal: resampling cannot see what never came.
    """
    if not values:
        return math.nan, math.nan
    array = np.asarray(values, dtype=np.float64)
    if (array == array[0]).all():
        return float(array[0]), float(array[0])
    generator = np.random.Generator(np.random.PCG64(seed))
    size = len(array)
    means = [array[generator.integers(size, size=size)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
