"""Where samples come from: episodes with the current policy, stored rollouts, or responses given with the data.

All feed the same planner and the same optimizer step. Leaves out the turns of an episode (``episodes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

from rlmodule.core.contract import Reward, RolloutEngine
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, RewardResult, Sample, ScoredSample
from rlmodule.data.rollouts import RolloutTable
from rlmodule.data.stream import PromptStream
from rlmodule.data.tables import select_rows
from rlmodule.experience.early_rewards import EarlyRewards
from rlmodule.experience.episodes import EpisodeRequest, EpisodeRunner, FinishedEpisode
from rlmodule.experience.timer import Timer

T = TypeVar("T")
RewardCall = Callable[[Sequence[Sample]], list[RewardResult]]


class Source(Protocol):
    """Gives this rank's share of an iteration's samples.

    ``has_rewards``: rewards differ from sample to sample, so they are worth logging.
    ``is_fresh``: the policy that is trained draws the samples.
    """

    has_rewards: ClassVar[bool]
    is_fresh: ClassVar[bool]

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """Samples with their rewards; sample ids are unique over all ranks and iterations."""


@dataclass(frozen=True, eq=False)
class RowSampler:
    """Takes the rows of an iteration and gives this rank its share of them.

    Args:
        stream: order of the rows and how far it has been read; the same on every rank.
        batch_size: rows of an iteration, over all ranks.
        layout: gives this process's place once the strategy is set up.
    """

    stream: PromptStream
    batch_size: int
    layout: Callable[[], Layout]

    def __call__(self) -> list[tuple[int, int]]:
        """(counter, row) of this rank's share. Ids are made of counters, so a row that comes again gets new ones."""
        return share_of_rank(self.stream.take(self.batch_size), self.layout())


@dataclass(frozen=True, eq=False)
class RolloutSource:
    """Rows -> episodes with the current policy -> rewards.

    Args:
        prompts: the rows.
        draw: this rank's share of an iteration's rows.
        n: episodes per row.
        episodes: runs them.
        engine: gives the rollout engine, with the current weights, once the strategy is set up.
        reward: reward function of episodes that end without a reward of their own.
        seed: keys the random numbers of sampling.
        greedy_baseline: answer every row greedily once more, for advantages relative to that response.
    """

    has_rewards: ClassVar[bool] = True
    is_fresh: ClassVar[bool] = True

    prompts: Sequence[Prompt]
    draw: RowSampler
    n: int
    episodes: EpisodeRunner
    engine: Callable[[], RolloutEngine]
    reward: Reward
    seed: int
    greedy_baseline: bool = False

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """The ``n`` samples of each row, with their rewards."""
        requests = self.requests()
        with EarlyRewards(self.reward) as early:
            with timer.phase("rollout"):
                finished = self.episodes.run(self.engine(), requests, early.begin)
            with timer.phase("reward"):
                return self.scored(finished, early)

    def scored(self, finished: Sequence[FinishedEpisode], early: RewardCall | None = None) -> list[ScoredSample]:
        """The samples with their rewards and those of the greedy responses, in the order of their requests.

        Args:
            finished: their episodes.
            early: has begun with some; the reward function judges them now without it.
        """
        scored = with_rewards(finished, early or self.reward)
        baselines = {s.sample.group_id: s.score.value for s in scored if s.sample.sample_id < 0}
        return [replace(s, baseline=baselines.get(s.sample.group_id)) for s in scored if s.sample.sample_id >= 0]

    def requests(self) -> list[EpisodeRequest]:
        """Take the rows of an iteration: this rank's samples, then greedy responses, whose ids are negative."""
        mine = self.draw()
        prompts = select_rows(self.prompts, [row for _, row in mine])
        rows = [(counter, prompt) for (counter, _), prompt in zip(mine, prompts, strict=True)]
        samples = [
            EpisodeRequest(row, counter * self.n + number, counter, self.seed)
            for counter, row in rows
            for number in range(self.n)
        ]
        greedy = [EpisodeRequest(row, -1 - counter, counter, self.seed, greedy=True) for counter, row in rows]
        return [*samples, *greedy] if self.greedy_baseline else samples


def with_rewards(episodes: Sequence[FinishedEpisode], reward: RewardCall) -> list[ScoredSample]:
    """The samples in order, each with its episode's reward; those without one are given to ``reward``, all at once."""
    unscored = [episode.to_score for episode in episodes if episode.reward is None]
    rewards = reward(unscored) if unscored else []
    assert len(rewards) == len(unscored), f"{len(rewards)} rewards for {len(unscored)} samples"
    given = iter(rewards)
    scores = [e.scored(next(given) if e.reward is None else e.reward) for e in episodes]
    return [ScoredSample(e.sample, score, answer=e.to_score.text) for e, score in zip(episodes, scores, strict=True)]


@dataclass(frozen=True, eq=False)
class StoredSource:
    """Whole groups of responses that were sampled and rewarded earlier.

    Args:
        table: the responses by group.
        draw: this rank's share of an iteration's groups.
    """

    has_rewards: ClassVar[bool] = True
    is_fresh: ClassVar[bool] = False

    table: RolloutTable
    draw: RowSampler

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """The responses of each group, with the rewards stored beside them."""
        largest = self.table.largest
        with timer.phase("read"):
            return [
                response.scored(counter * largest + i, counter)
                for counter, group in self.draw()
                for i, response in enumerate(self.table.read(self.table.groups[group]))
            ]


@dataclass(frozen=True, eq=False)
class OfflineSource:
    """Rows with given responses; those of a row are a group.

    Args:
        rows: the responses of each row: one to imitate, or a better and a worse one.
        rewards: reward of each response of a row, the same in every row.
        draw: this rank's share of an iteration's rows.
    """

    has_rewards: ClassVar[bool] = False  # every row has the same
    is_fresh: ClassVar[bool] = False

    rows: Sequence[Sequence[Sample]]
    rewards: Sequence[float]
    draw: RowSampler

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """The responses of each row, with ids that are new in every pass."""
        mine = self.draw()
        rows = select_rows(self.rows, [row for _, row in mine])
        return [
            ScoredSample(
                replace(sample, sample_id=counter * len(self.rewards) + location, group_id=counter), RewardResult(value)
            )
            for (counter, _), row in zip(mine, rows, strict=True)
            for location, (sample, value) in enumerate(zip(row, self.rewards, strict=True))
        ]


def share_of_rank(items: Sequence[T], layout: Layout) -> list[T]:
    """Every n-th item, n being the number of data times sequence ranks, so that long and short neighbours spread.

    Sequence ranks, which share rows in training, sample different responses; samples then move to every rank that
    trains on them.
    """
    return list(items[layout.dp_sp_rank :: layout.dp_sp_size])
