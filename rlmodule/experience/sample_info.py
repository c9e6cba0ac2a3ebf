"""What every rank gets to know of a sample: lengths and rewards. ``sample_table.py`` has them of all samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmodule.core.types import SampleMeta


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
        num_shown: tokens of the response that an environment showed, and that nobody drew.
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
    num_shown: int = 0
