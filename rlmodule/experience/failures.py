"""Samples on which the reward function failed: counted over all ranks, told of once, and the end of a run that has
nothing else. Leaves out what a failure is (``rewards/``).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmodule.core.errors import TrainingError
from rlmodule.core.metrics import exact_sum
from rlmodule.experience.sample_info import SampleInfo
from rlmodule.experience.sample_table import SampleTable


def check_not_all_failed(sample_info: SampleTable, of_what: str) -> None:
    """End the run when the reward function failed on every sample, whichever rank scored them.

    Args:
        sample_info: every sample of all ranks.
        of_what: where they are from, for the message.

    Raises:
        TrainingError: with the first failure; the same on every rank.
    """
    failed = num_failed(sample_info)
    if failed and failed == len(sample_info) - int(sample_info.is_stale.sum()):
        raise TrainingError(f"the reward failed on all {failed} responses of {of_what}. {first_failure(sample_info)}")


def check_not_all_stale(sample_info: SampleTable) -> None:
    """End the run when every sample was drawn by a policy too old to be learned from.

    Raises:
        TrainingError: the same on every rank.
    """
    if len(sample_info) and sample_info.is_stale.all():
        raise TrainingError(
            f"all {len(sample_info)} responses of the iteration are older than rollout.max_staleness allows, so "
            "nothing is learned. Raise rollout.max_staleness, or lower rollout.ahead"
        )


def reward_counts(sample_info: SampleTable) -> dict[str, float]:
    """``reward/NAME`` for what rewards count, such as ``failed``, over all samples that are not trained on again."""
    counts = {name: column.there for name, column in sorted(drawn_last(sample_info).counts.items())}
    return {f"reward/{name}": exact_sum(values) for name, values in counts.items() if len(values)}


def num_failed(sample_info: SampleTable) -> int:
    """Samples on which the reward function failed."""
    return int(sample_info.failed.sum())


def first_failure(sample_info: SampleTable) -> str:
    """What went wrong with the first sample that failed, by sample id."""
    here = set(sample_info.metas.sample_id[sample_info.failed].tolist())
    first = min(here.intersection(sample_info.failures), default=None)
    return "" if first is None else f"The first is {sample_info.failures[first]}"


def drawn_last(sample_info: Sequence[SampleInfo]) -> SampleTable:
    """The samples that are not trained on again."""
    table = SampleTable.of(sample_info)
    return table.where(~table.is_replayed)
