"""The responses of an iteration, over all ranks: checked, and asked for again where flat groups are replaced.

Leaves out where they come from (``experience/sources.py``) and what is told of each (``facts.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from rlmodule.algorithm.objective import Objective
from rlmodule.algorithm.shaping import first_groups, informative
from rlmodule.core.contract import Collectives
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import Sample, ScoredSample
from rlmodule.experience.facts import SampleFacts, gather_facts, rewards_of


def collect_groups(
    collect: Callable[[], list[ScoredSample]], objective: Objective, collectives: Collectives
) -> tuple[list[Sample], list[SampleFacts], dict[str, float]]:
    """(this rank's samples, facts of all, metrics); asks for more where flat groups are to be replaced.

    Which groups stay follows from the facts, which every rank has: the first ones that tell anything, in the order
    of the prompts. When the rounds are used up the iteration is smaller; when no group tells anything, the last
    round is kept as it is.
    """
    settings = objective.settings

    def more() -> tuple[list[Sample], list[SampleFacts]]:
        return gather_facts(lambda: _checked(collect(), objective), collectives, mask_truncated=settings.mask_truncated)

    mine, facts = last_mine, last_facts = more()
    if not settings.filter_groups.enable:
        return mine, facts, {}
    num_groups = len({f.meta.group_id for f in facts})
    rounds = 1
    kept = _informative_groups(facts, num_groups)
    while len(kept) < num_groups and rounds < settings.filter_groups.max_num_gen_batches:
        last_mine, last_facts = more()
        mine, facts, rounds = mine + last_mine, facts + last_facts, rounds + 1
        kept = _informative_groups(facts, num_groups)
    rewards = [f.reward for f in facts if f.reward is not None and math.isfinite(f.reward)]
    metrics = {
        "filter_groups/gen_batches": float(rounds),
        "filter_groups/kept": len(kept) / max(len({f.meta.group_id for f in facts}), 1),
        "filter_groups/reward_mean": math.fsum(rewards) / len(rewards) if rewards else math.nan,
    }
    if not kept:
        return last_mine, last_facts, metrics
    return (
        [s for s in mine if s.group_id in kept],
        [f for f in facts if f.meta.group_id in kept],
        metrics,
    )


def _informative_groups(facts: Sequence[SampleFacts], count: int) -> set[int]:
    group = [f.meta.group_id for f in facts]
    tells = informative(rewards_of(facts), torch.tensor(group)).tolist() if facts else []
    return first_groups(group, tells, count)


def _checked(scored: list[ScoredSample], objective: Objective) -> list[ScoredSample]:
    """The same samples; each has the log-probabilities that somebody is going to read."""
    settings = objective.settings
    for reader, remedy, is_on in (
        ("old_logprob=sampler", "old_logprob=recompute", settings.old_logprob == "sampler"),
        ("rollout_correction", "rollout_correction.mode=none", settings.rollout_correction.is_on),
    ):
        for sample in (s.sample for s in scored if is_on and objective.needs_old_logprob):
            if sample.sampler_logprob is None:
                raise TrainingError(
                    f"sample {sample.sample_id} comes without the log-probabilities it was drawn with, "
                    f"which algorithm.{reader} wants. Use algorithm.{remedy}"
                )
    return scored
