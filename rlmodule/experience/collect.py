"""The responses of an iteration, over all ranks: checked, and asked for again where flat groups are replaced.

Leaves out where they come from (``experience/sources.py``) and what is told of each (``sample_info.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from rlmodule.algorithm.objective import Objective
from rlmodule.algorithm.shaping import first_groups, has_reward_variance
from rlmodule.core.contract import Collectives
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import Sample, ScoredSample
from rlmodule.experience.failures import check_not_all_failed, check_not_all_stale, reward_counts
from rlmodule.experience.gathering import gather_sample_info
from rlmodule.experience.sample_table import SampleTable


@dataclass(frozen=True)
class Collected:
    """The samples of an iteration.

    Args:
        mine: those of this rank.
        sample_info: facts of all ranks' samples.
        metrics: of collecting them.
        left_out: facts of those that were collected and are not learned from.
    """

    mine: Sequence[Sample]
    sample_info: SampleTable
    metrics: dict[str, float]
    left_out: SampleTable = field(default_factory=partial(SampleTable.of, ()))

    def __post_init__(self) -> None:
        # Samples find their place, their rank and their fate by id; fresh and replayed ones share the numbers.
        ids = np.concatenate([self.sample_info.metas.sample_id, self.left_out.metas.sample_id])
        if not (ids[1:] > ids[:-1]).all():  # sorted ids, the usual case, need no sorting
            found, times = np.unique(ids, return_counts=True)
            assert len(found) == len(ids), f"two samples of an iteration have the id {found[times > 1][0]}"


def collect_groups(
    collect: Callable[[], list[ScoredSample]], objective: Objective, collectives: Collectives
) -> Collected:
    """The samples of an iteration; asks for more where flat groups are to be replaced.

    Which groups stay follows from the facts, which every rank has: the first ones that tell anything, in the order
    of the prompts. When the rounds are used up the iteration is smaller; when no group tells anything, the last
    round is kept as it is.
    """
    config = objective.config

    def more() -> tuple[list[Sample], SampleTable]:
        return gather_sample_info(
            lambda: check_logprobs(collect(), objective), collectives, mask_truncated=config.mask_truncated
        )

    mine, sample_info = last_mine, last_info = more()
    if not config.filter_groups.enable:
        check_not_all_stale(sample_info)
        check_not_all_failed(sample_info, "the iteration")
        return Collected(mine, sample_info, reward_counts(sample_info))
    num_groups = len(np.unique(sample_info.metas.group_id))
    rounds = 1
    kept = _groups_with_variance(sample_info, num_groups)
    while len(kept) < num_groups and rounds < config.filter_groups.max_num_gen_batches:
        last_mine, last_info = more()
        mine, sample_info, rounds = mine + last_mine, SampleTable.joined([sample_info, last_info]), rounds + 1
        kept = _groups_with_variance(sample_info, num_groups)
    check_not_all_stale(sample_info)
    check_not_all_failed(sample_info, "the iteration")
    rewards = sample_info.reward[sample_info.is_scored].tolist()
    metrics = {
        **reward_counts(sample_info),
        "filter_groups/gen_batches": float(rounds),
        "filter_groups/kept": len(kept) / max(len(np.unique(sample_info.metas.group_id)), 1),
        "filter_groups/reward_mean": math.fsum(rewards) / len(rewards) if rewards else math.nan,
    }
    if not kept:
        mine, kept = last_mine, set(last_info.metas.group_id.tolist())
    is_kept = np.isin(sample_info.metas.group_id, list(kept))
    return Collected(
        [s for s in mine if s.group_id in kept],
        sample_info.where(is_kept),
        metrics,
        sample_info.where(~is_kept),
    )


def _groups_with_variance(sample_info: SampleTable, count: int) -> set[int]:
    reward, group = torch.from_numpy(sample_info.reward), torch.from_numpy(sample_info.metas.group_id)
    tells = has_reward_variance(reward, group).tolist() if sample_info else []
    return first_groups(group.tolist(), tells, count)


def check_logprobs(scored: list[ScoredSample], objective: Objective) -> list[ScoredSample]:
    """The same samples; each has the log-probabilities that somebody is going to read."""
    config = objective.config
    for reader, remedy, is_on in (
        ("old_logprob=rollout", "old_logprob=recompute", config.old_logprob == "rollout"),
        ("rollout_correction", "rollout_correction.mode=none", config.rollout_correction.is_on),
        (
            "rollout_rejection",
            "rollout_rejection.token_estimator=none algorithm.rollout_rejection.sequence_estimator=none",
            config.rollout_rejection.is_on,
        ),
    ):
        for sample in (s.sample for s in scored if is_on and objective.needs_old_logprob):
            if sample.rollout_logprob is None:
                raise TrainingError(
                    f"sample {sample.sample_id} comes without the log-probabilities it was drawn with, "
                    f"which algorithm.{reader} wants. Use algorithm.{remedy}"
                )
    return scored
