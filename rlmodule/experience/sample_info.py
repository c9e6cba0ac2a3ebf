"""What every rank gets to know of every sample: lengths and rewards, gathered in one exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlmodule.core.contract import Collectives
from rlmodule.core.errors import EnginesGoneError, RLModuleError, TrainingError
from rlmodule.core.types import Sample, SampleMeta, ScoredSample


@dataclass(frozen=True)
class SampleInfo:
    """What every rank gets to know of a sample.

    Args:
        meta: ids and lengths.
        reward: None when it could not be scored.
        parts: named components of the reward.
        truncated: whether the response was cut at the limit.
        baseline: reward of the greedy response to the same prompt, where there is one.
        version: iterations trained before it was drawn, before its oldest token where weights changed.
        diagnostics: further numbers that the reward gives, for logs.
        counts: what the reward counts, for logs.
        failure: what went wrong where the reward function failed, empty for all but a rank's first; None elsewhere.
        is_replayed, is_stale: as in ScoredSample.
        is_mixed: its tokens were drawn by more than one version.
    """

    meta: SampleMeta
    reward: float | None
    parts: Mapping[str, float]
    truncated: bool
    baseline: float | None = None
    version: int = 0
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    is_replayed: bool = False
    is_stale: bool = False
    is_mixed: bool = False

    @property
    def is_scored(self) -> bool:
        """Whether the reward says anything about it."""
        return self.reward is not None and math.isfinite(self.reward)


def gather_sample_info(
    collect: Callable[[], list[ScoredSample]], collectives: Collectives, *, mask_truncated: bool = False
) -> tuple[list[Sample], list[SampleInfo]]:
    """(this rank's samples, facts of every rank's by sample id). Unscored samples lose their loss tokens.

    With ``mask_truncated`` so do responses that were cut at the limit; they keep their reward.

    Raises:
        EnginesGoneError: on every rank, when one of them has no server left that samples.
        TrainingError: on every rank, when collecting failed on any.
    """
    try:
        scored, failure = [_masked(s, mask_truncated) for s in collect()], None
    except RLModuleError as error:
        scored, failure = [], error
    sample_info = [_info_of(s) for s in scored]
    failed = [i for i, info in enumerate(sample_info) if info.failure is not None]
    for i in failed[1:]:  # one traceback of each rank is enough to send around
        sample_info[i] = replace(sample_info[i], failure="")
    are_gone = isinstance(failure, EnginesGoneError)
    everyone = collectives.gather_objects((sample_info, None if failure is None else str(failure), are_gone))
    gone = next((reason for _, reason, are_gone in everyone if are_gone), None)
    if gone is not None:  # the same error everywhere: every rank takes part in saving what was trained
        raise EnginesGoneError(gone)
    if failure is not None:
        raise failure
    for rank, (_, reason, _) in enumerate(everyone):
        if reason is not None:
            raise TrainingError(f"rank {rank} could not collect its responses: {reason}")
    return [s.sample for s in scored], sorted(
        (f for part, _, _ in everyone for f in part), key=lambda f: f.meta.sample_id
    )


def _info_of(scored: ScoredSample) -> SampleInfo:
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
    )


def _masked(scored: ScoredSample, mask_truncated: bool) -> ScoredSample:
    is_scored = scored.score.value is not None and math.isfinite(scored.score.value)
    if is_scored and not (mask_truncated and scored.sample.finish_reason == "length"):
        return scored
    return replace(scored, sample=replace(scored.sample, loss_mask=torch.zeros_like(scored.sample.loss_mask)))


def rewards_of(sample_info: Sequence[SampleInfo]) -> Tensor:
    """[B] float64, NaN where a sample could not be scored."""
    return to_float64([f.reward for f in sample_info])


def to_float64(values: Sequence[float | None]) -> Tensor:
    """[B] float64, NaN for None."""
    return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)
