"""Where samples come from: rollouts of the current policy, stored ones, or what somebody wrote.

All feed the same planner and step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

from rlmodule.core.contract import Reward, RolloutEngine, SampleRequest
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, RewardResult, Sample, ScoredSample
from rlmodule.data.rollouts import RolloutTable
from rlmodule.data.stream import PromptStream
from rlmodule.experience.timer import Timer

T = TypeVar("T")


class Source(Protocol):
    """Gives this rank's share of an iteration's samples.

    ``has_rewards``: rewards say something of the samples. ``is_fresh``: the current policy draws them.
    """

    has_rewards: ClassVar[bool]
    is_fresh: ClassVar[bool]

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """Samples with their verdicts; sample ids are unique over all ranks and iterations."""


@dataclass(frozen=True, eq=False)
class RowSampler:
    """Takes the rows of an iteration; each falls to one token rank.

    Args:
        stream: order of the rows and how far it has been read; the same on every rank.
        batch_size: rows of an iteration, over all ranks.
        layout: gives this process's place once the strategy is set up.
    """

    stream: PromptStream
    batch_size: int
    layout: Callable[[], Layout]

    def __call__(self) -> list[tuple[int, int]]:
        """(counter, row) of this rank's share; ids are made from counters, so a row that comes again has new ones."""
        return share_of_rank(self.stream.take(self.batch_size), self.layout())


@dataclass(frozen=True, eq=False)
class RolloutSource:
    """Prompts -> responses of the current policy -> rewards.

    Args:
        prompts: rows to draw from.
        draw: this rank's share of an iteration's prompts.
        n: responses per prompt.
        engine: gives the rollout engine once the strategy is set up.
        reward: the judge.
        seed: keys the sampling.
        greedy_baseline: answer every prompt greedily once more, for advantages against that answer.
    """

    has_rewards: ClassVar[bool] = True
    is_fresh: ClassVar[bool] = True

    prompts: Sequence[Prompt]
    draw: RowSampler
    n: int
    engine: Callable[[], RolloutEngine]
    reward: Reward
    seed: int
    greedy_baseline: bool = False

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """The ``n`` responses to each prompt, with their verdicts."""
        mine = self.draw()
        requests = [
            SampleRequest(prompt=i, sample_id=counter * self.n + j, group_id=counter, seed=self.seed)
            for i, (counter, _) in enumerate(mine)
            for j in range(self.n)
        ]
        if self.greedy_baseline:
            requests += [
                SampleRequest(prompt=i, sample_id=counter, group_id=counter, seed=self.seed, greedy=True)
                for i, (counter, _) in enumerate(mine)
            ]
        with timer.phase("rollout"):
            samples = self.engine().generate([self.prompts[row] for _, row in mine], requests)
        with timer.phase("reward"):
            scores = self.reward(samples) if samples else []
        drawn_now = [replace(sample, version=iteration) for sample in samples]
        scored = list(zip(drawn_now, scores, strict=True))
        count = len(mine) * self.n
        baselines = {sample.group_id: score.value for sample, score in scored[count:]}
        return [ScoredSample(sample, score, baselines.get(sample.group_id)) for sample, score in scored[:count]]


@dataclass(frozen=True, eq=False)
class StoredSource:
    """Whole groups of responses that were sampled earlier; nothing is drawn and nothing judged.

    Args:
        table: the responses by group.
        draw: this rank's share of an iteration's groups.
    """

    has_rewards: ClassVar[bool] = True
    is_fresh: ClassVar[bool] = False

    table: RolloutTable
    draw: RowSampler

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """The responses of each group, with the verdicts that were stored."""
        largest = self.table.largest
        with timer.phase("read"):
            return [
                response.scored(counter * largest + i, counter)
                for counter, group in self.draw()
                for i, response in enumerate(self.table.read(self.table.groups[group]))
            ]


@dataclass(frozen=True, eq=False)
class OfflineSource:
    """Rows of responses that somebody wrote; those of a row are a group.

    Args:
        rows: one response to imitate each, or a better and a worse one.
        rewards: what the responses of a row score, in every row alike.
        draw: this rank's share of an iteration's rows.
    """

    has_rewards: ClassVar[bool] = False  # the verdicts never change
    is_fresh: ClassVar[bool] = False

    rows: Sequence[Sequence[Sample]]
    rewards: Sequence[float]
    draw: RowSampler

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """The responses of each row under the ids of a run."""
        return [
            ScoredSample(
                replace(sample, sample_id=counter * len(self.rewards) + location, group_id=counter), RewardResult(value)
            )
            for counter, row in self.draw()
            for location, (sample, value) in enumerate(zip(self.rows[row], self.rewards, strict=True))
        ]


def share_of_rank(items: Sequence[T], layout: Layout) -> list[T]:
    """Every n-th item for n token ranks, so that long and short neighbours spread over them.

    Ranks that share rows in training divide the sampling of whole responses as well; samples then move to every rank
    that trains on them.
    """
    return list(items[layout.dp_sp_rank :: layout.dp_sp_size])
