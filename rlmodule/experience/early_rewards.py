"""Responses are judged while others are still being drawn, where judges run in other processes or on a server.

A reward is a function of its sample, so when it is asked for changes no number: results are taken in the order of the
samples, and an error is raised where it would have been raised without this. Leaves out who judges (``rewards/``).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from types import TracebackType

from rlmodule.core.contract import Reward, SeparateReward
from rlmodule.core.types import RewardResult, Sample
from rlmodule.experience.episodes import FinishedEpisode

AT_ONCE = 64  # samples that are judged together, so that one which takes long holds up few that come later


class EarlyRewards:
    """A reward function that may begin before it is called; to be left (``with``) once it was called.

    Args:
        reward: judges. One that runs in this process does so when it is called, for a thread of its own gains nothing.
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._waiting: queue.SimpleQueue[Sample | None] = queue.SimpleQueue()
        self._results: dict[int, RewardResult] = {}  # by sample id
        self._problem: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._is_left = False

    def __enter__(self) -> EarlyRewards:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_left = True
        self._waiting.put(None)

    def begin(self, episode: FinishedEpisode) -> None:
        """Have an episode judged that has ended, unless it brings its reward along."""
        if episode.reward is not None or not isinstance(self._reward, SeparateReward) or not self._reward.runs_apart:
            return
        if self._thread is None:
            # As a daemon: it ends with the process, whatever a judge is busy with.
            self._thread = threading.Thread(target=self._work, daemon=True, name="rewards")
            self._thread.start()
        self._waiting.put(episode.to_score)

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One result per sample, in order; waits for those that were begun, and asks for the others.

        Raises:
            RLModuleError: a judge raised it, now or earlier.
        """
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
        if self._problem is not None:
            raise self._problem
        left = [sample for sample in samples if sample.sample_id not in self._results]
        if left:
            self._results |= _by_id(left, self._reward(left))
        return [self._results[sample.sample_id] for sample in samples]

    def _work(self) -> None:
        """Have judged what waits, until None comes."""
        is_last = False
        try:
            while not is_last and not self._is_left:
                batch = [self._waiting.get()]
                while len(batch) < AT_ONCE and not self._waiting.empty():
                    batch.append(self._waiting.get())
                samples = [sample for sample in batch if sample is not None]
                is_last = len(samples) < len(batch)
                if samples:
                    self._results |= _by_id(samples, self._reward(samples))
        except BaseException as error:  # for whoever asks
            self._problem = error


def _by_id(samples: Sequence[Sample], results: Sequence[RewardResult]) -> dict[int, RewardResult]:
    assert len(results) == len(samples), f"{len(results)} rewards for {len(samples)} samples"
    return {sample.sample_id: result for sample, result in zip(samples, results, strict=True)}
