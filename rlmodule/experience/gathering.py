"""What every rank knows of its samples is told to all, in one exchange."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from rlmodule.core.contract import Collectives
from rlmodule.core.errors import EnginesGoneError, RLModuleError, TrainingError
from rlmodule.core.types import Sample, ScoredSample
from rlmodule.experience.sample_info import SampleInfo
from rlmodule.experience.sample_table import SampleTable


def gather_sample_info(
    collect: Callable[[], list[ScoredSample]], collectives: Collectives, *, mask_truncated: bool = False
) -> tuple[list[Sample], SampleTable]:
    """(this rank's samples, facts of every rank's by sample id). Unscored samples lose their loss tokens.

    With ``mask_truncated`` so do responses that were cut at the limit; they keep their reward.

    Raises:
        EnginesGoneError: on every rank, when one of them has no server left that samples.
        TrainingError: on every rank, when collecting failed on any.
    """
    try:
        collected, failure = collect(), None
    except RLModuleError as error:
        collected, failure = [], error
    scored = [_masked(s, mask_truncated) for s in collected]
    num_shown = [int((~s.sample.loss_mask).sum()) for s in collected]
    sample_info = [_info_of(s, shown) for s, shown in zip(scored, num_shown, strict=True)]
    failed = [i for i, info in enumerate(sample_info) if info.failure is not None]
    for i in failed[1:]:  # one traceback of each rank is enough to send around
        sample_info[i] = replace(sample_info[i], failure="")
    are_gone = isinstance(failure, EnginesGoneError)
    told = None if failure is None else str(failure)
    everyone = collectives.gather_objects((SampleTable.of(sample_info).packed(), told, are_gone))
    gone = next((reason for _, reason, are_gone in everyone if are_gone), None)
    if gone is not None:  # the same error everywhere: every rank takes part in saving what was trained
        raise EnginesGoneError(gone)
    if failure is not None:
        raise failure
    for rank, (_, reason, _) in enumerate(everyone):
        if reason is not None:
            raise TrainingError(f"rank {rank} could not collect its responses: {reason}")
    return [s.sample for s in scored], SampleTable.gathered([part for part, _, _ in everyone])


def _info_of(scored: ScoredSample, num_shown: int) -> SampleInfo:
    sample, score = scored.sample, scored.score
    return SampleInfo(
        sample.meta,
        score.value,
        dict(score.parts),
        sample.finish_reason == "length",
        scored.baseline,
        sample.version,
        dict(score.diagnostics),
        dict(score.counts),
        score.failure,
        scored.is_replayed,
        scored.is_stale,
        sample.token_versions is not None,
        num_shown,
    )


def _masked(scored: ScoredSample, mask_truncated: bool) -> ScoredSample:
    is_scored = scored.score.value is not None and math.isfinite(scored.score.value)
    if is_scored and not (mask_truncated and scored.sample.finish_reason == "length"):
        return scored
    return replace(scored, sample=replace(scored.sample, loss_mask=torch.zeros_like(scored.sample.loss_mask)))
