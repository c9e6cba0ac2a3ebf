"""Episodes of the next iterations run while earlier ones are trained on (``rollout.ahead``), on servers.

Responses are then some iterations old when they are trained on: importance weights correct for it, and what is older
than ``rollout.max_staleness`` is dropped. Leaves out what servers do while their weights change
(``rollout/parts/server_engine.py``) and what is saved of episodes under way (``in_flight.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from rlmodule.core.config import at_least, at_most, one_of
from rlmodule.core.contract import ConcurrentEngine
from rlmodule.core.episodes import PAUSES, WAIT
from rlmodule.core.types import RewardResult, ScoredSample
from rlmodule.experience.episodes import FinishedEpisode
from rlmodule.experience.in_flight import InFlight
from rlmodule.experience.sources import RolloutSource
from rlmodule.experience.timer import Timer


@dataclass(frozen=True)
class AheadConfig:
    """How far sampling runs ahead of training; its keys stand in the ``rollout`` section."""

    ahead: int = 0  # iterations whose responses are drawn while earlier ones are trained on; 0: one after the other
    max_staleness: int | None = None  # iterations old that a response may be when it is trained on; null: ahead
    pause: str = WAIT  # what becomes of responses under way when weights change: wait, abort or keep

    def __post_init__(self) -> None:
        at_least("ahead", self.ahead, 0)
        one_of("pause", self.pause, PAUSES)
        if self.max_staleness is not None:
            at_least("max_staleness", self.max_staleness, 0)
            at_most("max_staleness", self.max_staleness, self.ahead)

    @property
    def oldest(self) -> int:
        """Iterations old that a response may be."""
        return self.ahead if self.max_staleness is None else self.max_staleness


@dataclass(frozen=True, eq=False)
class AheadSource:
    """Like its ``inner`` source, whose episodes begin ``config.ahead`` iterations before they are due.

    Args:
        inner: takes rows, and scores their episodes.
        config: how far ahead.
        in_flight: episodes under way.
        num_iterations: of the whole run; nothing is drawn for later ones.
    """

    has_rewards: ClassVar[bool] = True
    is_fresh: ClassVar[bool] = True

    inner: RolloutSource
    config: AheadConfig
    in_flight: InFlight
    num_iterations: int

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """The samples of the oldest rows under way; those of later iterations are begun first."""
        flights = self.in_flight.flights
        with timer.phase("rollout"):
            engine = self.inner.engine()
            assert isinstance(engine, ConcurrentEngine), "checked before a run"
            responder = engine.beside()  # on every rank: from now on weights change with care
            run = partial(self.inner.episodes.stream, responder) if engine.is_leader else None
            for _ in range(len(flights), 1 + min(self.config.ahead, self.num_iterations - 1 - iteration)):
                self.in_flight.launch(self.inner.requests, run)
            finished = engine.shared(flights[0].wait)
            flights.popleft()
        with timer.phase("reward"):
            return self._scored(finished, oldest_version=iteration - self.config.oldest)

    def _scored(self, finished: Sequence[FinishedEpisode], oldest_version: int) -> list[ScoredSample]:
        """In the order of their requests; samples of an earlier version are not scored, so nothing learns from them."""
        stale = {
            e.sample.sample_id: ScoredSample(e.sample, RewardResult(None), is_stale=True)
            for e in finished
            if e.sample.sample_id >= 0 and e.sample.version < oldest_version
        }
        scored = self.inner.scored([e for e in finished if e.sample.sample_id not in stale])
        found = stale | {s.sample.sample_id: s for s in scored}
        return [found[e.sample.sample_id] for e in finished if e.sample.sample_id >= 0]
