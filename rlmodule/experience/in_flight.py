"""Rows of the stream whose episodes run beside training, and what a checkpoint keeps of them.

Episodes that have ended are kept; the others are asked for again under the same sample ids, so that none is lost and
none comes twice. Leaves out when rows are taken (``ahead.py``) and how episodes run (``episodes.py``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmodule.checkpoint.samples import PlainState, fields_of, samples_from, samples_state
from rlmodule.core.types import RewardResult
from rlmodule.data.stream import PromptStream
from rlmodule.experience.episodes import EpisodeRequest, FinishedEpisode

JOIN_SECONDS = 10.0  # for threads whose requests were broken off

Run = Callable[[Sequence[EpisodeRequest]], Iterator[FinishedEpisode]]


@dataclass(eq=False)
class Flight:
    """The episodes of one iteration's rows, in a thread of their own.

    Args:
        place: of the stream before these rows.
        requests: this rank's episodes.
        finished: by sample id, those that have ended; some may have before it starts.
    """

    place: Mapping[str, int]
    requests: Sequence[EpisodeRequest]
    finished: dict[int, FinishedEpisode] = field(default_factory=dict)
    _problem: BaseException | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self, run: Run) -> None:
        """Run the episodes that have not ended."""
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True, name="rollout ahead")
        self._thread.start()

    def wait(self) -> list[FinishedEpisode]:
        """All episodes in the order of the requests, whatever the order in which they ended.

        Raises:
            RLModuleError: what ended the thread.
        """
        self.join(None)
        if self._problem is not None:
            raise self._problem
        return [self.finished[request.sample_id] for request in self.requests]

    def join(self, seconds: float | None) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self, run: Run) -> None:
        try:
            for episode in run([request for request in self.requests if request.sample_id not in self.finished]):
                self.finished[episode.sample.sample_id] = episode
        except BaseException as error:  # for whoever waits
            self._problem = error


class InFlight:
    """What is under way, in the order of the stream.

    Args:
        stream: gives the rows; the same on every rank.
        settings: of sampling. Episodes of a checkpoint that were drawn with other ones are asked for again. None where
            nothing runs beside training.
        takes_over: whether episodes of a checkpoint may be used at all; not where rows or environment are others.
    """

    def __init__(
        self, stream: PromptStream, settings: Mapping[str, Any] | None = None, *, takes_over: bool = True
    ) -> None:
        self.stream = stream
        self.takes_over = takes_over
        self.settings = settings
        self.flights: deque[Flight] = deque()
        self._kept: dict[int, FinishedEpisode] = {}  # ended before the run was resumed, by sample id

    @property
    def place(self) -> Mapping[str, int]:
        """Of the stream before the first row under way: where a resumed run goes on."""
        return self.flights[0].place if self.flights else self.stream.state_dict()

    @property
    def first_row(self) -> int:
        """The same as a number of rows."""
        return self.place["consumed"]

    def launch(self, requests: Callable[[], Sequence[EpisodeRequest]], run: Run | None) -> None:
        """Take the next rows; ``run`` is None on a rank that is handed the episodes of another."""
        place = self.stream.state_dict()
        flight = Flight(place, requests())
        wanted = {request.sample_id for request in flight.requests}
        flight.finished |= {name: episode for name, episode in self._kept.items() if name in wanted}
        taken = self.stream.consumed  # other ranks have launched theirs of these rows as well
        self._kept = {name: e for name, e in self._kept.items() if e.sample.group_id >= taken}
        self.flights.append(flight)
        if run is not None:
            flight.start(run)

    def abandon(self, place: Mapping[str, int]) -> None:
        """Go back to a place in the stream; what has ended is kept."""
        for flight in self.flights:
            self._kept |= flight.finished
        self.flights.clear()
        self.stream.load_state_dict(place)

    def close(self) -> None:
        """Wait for threads that have nothing more to do, since the engine is closed."""
        for flight in self.flights:
            flight.join(JOIN_SECONDS)

    def state(self) -> PlainState | None:
        """This rank's episodes that have ended, as plain values and tensors; None where nothing runs ahead."""
        if self.settings is None:
            return None
        ended = [episode for flight in self.flights for episode in flight.finished.copy().values()]
        return {"settings": dict(self.settings), **episodes_state([*self._kept.values(), *ended])}

    def load(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Take over the episodes of all saved ranks; each rank uses those of its own rows."""
        for state in states:
            if self.takes_over and state["settings"] == self.settings:
                self._kept |= {episode.sample.sample_id: episode for episode in episodes_from(state)}


def episodes_state(episodes: Sequence[FinishedEpisode]) -> PlainState:
    """Episodes as plain values and tensors, for ``episodes_from``."""
    fields = [{**fields_of(e), "reward": None if e.reward is None else fields_of(e.reward)} for e in episodes]
    for one in fields:
        del one["sample"]
    return {**samples_state([e.sample for e in episodes]), "episodes": fields}


def episodes_from(state: Mapping[str, Any]) -> list[FinishedEpisode]:
    """Inverse of ``episodes_state``."""
    return [
        FinishedEpisode(**{**one, "sample": sample, "reward": one["reward"] and RewardResult(**one["reward"])})
        for sample, one in zip(samples_from(state), state["episodes"], strict=True)
    ]
