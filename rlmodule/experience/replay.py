"""Responses of the last iterations, kept to be trained on again beside those of the policy as it is now.

What the policies between have learned since is corrected by weights (``algorithm/rollout_correction.py``); here is only
who is kept, for how long, and how it survives a restart on another number of ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from rlmodule.core.config import at_least
from rlmodule.core.contract import Layout
from rlmodule.core.types import ScoredSample


@dataclass(frozen=True)
class ReplayConfig:
    """How long responses are trained on; its keys stand in the ``rollout`` section."""

    staleness: int = 0  # earlier iterations whose responses are trained on again, weighted by rollout_correction

    def __post_init__(self) -> None:
        at_least("staleness", self.staleness, 0)


class ReplayMemory:
    """This rank's responses of the last iterations.

    Args:
        staleness: iterations that a response is kept after the one that it was drawn in; 0 keeps nothing.
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self._kept: list[ScoredSample] = []

    def with_earlier(self, new: list[ScoredSample], iteration: int) -> list[ScoredSample]:
        """The responses of ``iteration`` and, before them, those that are young enough; the former are kept as well."""
        young = [s for s in self._kept if s.sample.version >= iteration - self.staleness]
        self._kept = [*young, *new] if self.staleness else []
        return [*young, *new]

    def state(self) -> bytes | None:
        """What this rank keeps; None where nothing ever is."""
        return pickle.dumps(self._kept) if self.staleness else None

    def load(self, payloads: Sequence[bytes], layout: Layout) -> None:
        """Take this rank's share of what all ranks of a saved run kept."""
        everyone = [sample for parcel in payloads for sample in pickle.loads(parcel)]
        everyone.sort(key=lambda scored: scored.sample.sample_id)
        self._kept = everyone[layout.dp_sp_rank :: layout.dp_sp_size]
