"""Responses of the last iterations, kept to be trained on again beside those of the current policy.

Leaves out the weights that correct for what the policy has learned since (``algorithm/rollout_correction.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlmodule.checkpoint.samples import PlainState, scored_samples_from, scored_samples_state
from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
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
        group_size: responses of a row, of which sample ids are made; None where rows differ.
    """

    def __init__(self, staleness: int, group_size: int | None = None) -> None:
        self.staleness, self.group_size = staleness, group_size
        self._kept: list[ScoredSample] = []

    def with_earlier(self, new: list[ScoredSample], iteration: int) -> list[ScoredSample]:
        """The kept responses that are young enough, then the new ones of ``iteration``, which are kept from now on."""
        young = [s for s in self._kept if s.sample.version >= iteration - self.staleness]
        self._kept = [*young, *new] if self.staleness else []
        return [*(replace(s, is_replayed=True) for s in young), *new]

    def forget(self, iteration: int) -> None:
        """Leave out the responses of an iteration, which are drawn again."""
        self._kept = [s for s in self._kept if s.sample.version < iteration]

    def state(self) -> PlainState | None:
        """What this rank keeps, as plain values and tensors; None without replay."""
        return {**scored_samples_state(self._kept), "group_size": self.group_size} if self.staleness else None

    def load(self, states: Sequence[Mapping[str, Any]], layout: Layout) -> None:
        """Take this rank's share of what all ranks of the saved run kept.

        Raises:
            ConfigError: new responses would have the ids of these.
        """
        for saved in {state.get("group_size") for state in states if self.staleness}:
            if saved is not None and self.group_size is not None and saved > self.group_size:
                raise ConfigError(
                    key="rollout.n",
                    got=self.group_size,
                    because=f"the responses that rollout.staleness={self.staleness} trains on again were drawn with "
                    f"{saved}, and new ones would have the ids of some of them",
                    fix=f"Use rollout.n={saved}, or go on with rollout.staleness=0",
                )
        everyone = [sample for state in states for sample in scored_samples_from(state)]
        everyone.sort(key=lambda scored: scored.sample.sample_id)
        self._kept = everyone[layout.dp_sp_rank :: layout.dp_sp_size]
