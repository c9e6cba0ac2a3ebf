"""Samples on which the reward function failed: counted over all ranks, told of once, and the end of a run that has
nothing else. Leaves out what a failure is (``rewards/``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlmodule.core.errors import TrainingError
from rlmodule.experience.sample_info import SampleInfo


def check_not_all_failed(sample_info: Sequence[SampleInfo], of_what: str) -> None:
    """End the run when the reward function failed on every sample, whichever rank scored them.

    Args:
        sample_info: every sample of all ranks.
        of_what: where they are from, for the message.

    Raises:
        TrainingError: with the first failure; the same on every rank.
    """
    failed = num_failed(sample_info)
    if failed and failed == len(sample_info):
        raise TrainingError(f"the reward failed on all {failed} responses of {of_what}. {first_failure(sample_info)}")


def check_not_all_stale(sample_info: Sequence[SampleInfo]) -> None:
    """End the run when every sample was drawn by a policy too old to be learned from.

    Raises:
        TrainingError: the same on every rank.
    """
    if sample_info and all(info.is_stale for info in sample_info):
        raise TrainingError(
            f"all {len(sample_info)} responses of the iteration are older than rollout.max_staleness allows, so "
            "nothing is learned. Raise rollout.max_staleness, or lower rollout.ahead"
        )


def reward_counts(sample_info: Sequence[SampleInfo]) -> dict[str, float]:
    """``reward/NAME`` for what rewards count, such as ``failed``, over all samples that are not trained on again."""
    counts: Counter[str] = Counter()
    for info in sample_info:
        counts.update({} if info.is_replayed else info.counts)
    return {f"reward/{name}": float(value) for name, value in sorted(counts.items())}


def num_failed(sample_info: Sequence[SampleInfo]) -> int:
    """Samples on which the reward function failed."""
    return sum(info.failure is not None for info in sample_info)


def first_failure(sample_info: Sequence[SampleInfo]) -> str:
    """What went wrong with the first sample that failed, by sample id."""
    texts = (info.failure for info in sorted(sample_info, key=lambda info: info.meta.sample_id))
    return next((f"The first is {text}" for text in texts if text), "")
