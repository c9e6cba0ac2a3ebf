"""Where samples come from: rollouts of the current policy, stored ones, demonstrations, or pairs somebody judged.

All feed the same planner and step. Also the examination of the policy on held-out prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

from rlmodule.core.contract import Layout, Reward, RolloutEngine, SampleRequest
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import Prompt, Sample, Score, ScoredSample
from rlmodule.data.preferences import Pair
from rlmodule.data.rollouts import RolloutTable
from rlmodule.data.stream import PromptStream
from rlmodule.experience.stopwatch import Stopwatch

T = TypeVar("T")
VALIDATION_SEED = 0  # greedy sampling draws nothing; the key only has to be there


class Source(Protocol):
    """Gives this rank's share of an iteration's samples.

    ``is_judged``: rewards say something of the samples. ``is_fresh``: the current policy draws them.
    """

    is_judged: ClassVar[bool]
    is_fresh: ClassVar[bool]

    def collect(self, iteration: int, watch: Stopwatch) -> list[ScoredSample]:
        """Samples with their verdicts; sample ids are unique over all ranks and iterations."""


@dataclass(frozen=True, eq=False)
class RolloutSource:
    """Prompts -> responses of the current policy -> rewards.

    Args:
        prompts: rows to draw from.
        stream: order of the rows and how far it has been read; the same on every rank.
        batch_size: prompts of an iteration, over all ranks.
        n: responses per prompt.
        engine: gives the rollout engine once the strategy is set up.
        reward: the judge.
        layout: gives this process's place once the strategy is set up.
        seed: keys the sampling.
        greedy_baseline: answer every prompt greedily once more, for advantages against that answer.
    """

    is_judged: ClassVar[bool] = True
    is_fresh: ClassVar[bool] = True

    prompts: Sequence[Prompt]
    stream: PromptStream
    batch_size: int
    n: int
    engine: Callable[[], RolloutEngine]
    reward: Reward
    layout: Callable[[], Layout]
    seed: int
    greedy_baseline: bool = False

    def collect(self, iteration: int, watch: Stopwatch) -> list[ScoredSample]:
        """Every prompt is answered by one token rank; ids come from the stream's counter, not from ranks."""
        drawn = self.stream.take(self.batch_size)
        mine = share_of_rank(drawn, self.layout())
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
        with watch.phase("rollout"):
            samples = self.engine().generate([self.prompts[row] for _, row in mine], requests)
        with watch.phase("reward"):
            scores = self.reward(samples) if samples else []
        drawn_now = [replace(sample, version=iteration) for sample in samples]
        scored = list(zip(drawn_now, scores, strict=True))
        count = len(mine) * self.n
        baselines = {sample.group_id: score.value for sample, score in scored[count:]}
        return [ScoredSample(sample, score, baselines.get(sample.group_id)) for sample, score in scored[:count]]


@dataclass(frozen=True, eq=False)
class StoredSource:
    """Whole groups of responses that were sampled earlier, in a seeded order; nothing is drawn and nothing judged.

    Args:
        table: the responses by group.
        stream: order of the groups and how far it has been read; the same on every rank.
        batch_size: groups of an iteration, over all ranks.
        layout: gives this process's place once the strategy is set up.
    """

    is_judged: ClassVar[bool] = True
    is_fresh: ClassVar[bool] = False

    table: RolloutTable
    stream: PromptStream
    batch_size: int
    layout: Callable[[], Layout]

    def collect(self, iteration: int, watch: Stopwatch) -> list[ScoredSample]:
        """Every group is read by one token rank; ids come from the stream's counter, so a new pass has new ones."""
        scored: list[ScoredSample] = []
        with watch.phase("read"):
            for counter, group in share_of_rank(self.stream.take(self.batch_size), self.layout()):
                responses = self.table.read(self.table.groups[group])
                scored += [
                    response.scored(counter * self.table.largest + i, counter) for i, response in enumerate(responses)
                ]
        return scored


@dataclass(frozen=True, eq=False)
class Examination:
    """Greedy answers to held-out prompts, judged.

    Args:
        prompts: the same on every rank.
        engine: gives the rollout engine once the strategy is set up.
        reward: the judge.
        layout: gives this process's place once the strategy is set up.
    """

    prompts: Sequence[Prompt]
    engine: Callable[[], RolloutEngine]
    reward: Reward
    layout: Callable[[], Layout]

    def __call__(self) -> list[ScoredSample]:
        """This rank's share of the answers."""
        mine = share_of_rank(list(enumerate(self.prompts)), self.layout())
        requests = [
            SampleRequest(prompt=i, sample_id=place, group_id=place, seed=VALIDATION_SEED, greedy=True)
            for i, (place, _) in enumerate(mine)
        ]
        # Also without a share of its own: every rank takes part when a sharded model is made whole.
        samples = self.engine().generate([prompt for _, prompt in mine], requests)
        scores = self.reward(samples) if samples else []
        return [ScoredSample(sample, score) for sample, score in zip(samples, scores, strict=True)]


@dataclass(frozen=True, eq=False)
class DemonstrationSource:
    """Fixed samples to imitate, in a seeded order."""

    is_judged: ClassVar[bool] = False
    is_fresh: ClassVar[bool] = False

    samples: Sequence[Sample]
    stream: PromptStream
    batch_size: int
    layout: Callable[[], Layout]

    def collect(self, iteration: int, watch: Stopwatch) -> list[ScoredSample]:
        """This rank's share of the next demonstrations; each is worth imitating, so each scores 1."""
        if not self.samples:
            raise TrainingError("there are no demonstrations to imitate")
        drawn = share_of_rank(self.stream.take(self.batch_size), self.layout())
        return [ScoredSample(_renamed(self.samples[row], counter, counter), Score(1.0)) for counter, row in drawn]


@dataclass(frozen=True, eq=False)
class PreferenceSource:
    """Fixed pairs in a seeded order; the two samples of a pair are a group.

    Args:
        pairs: rows to draw from.
        stream: order of the rows and how far it has been read; the same on every rank.
        batch_size: pairs of an iteration, over all ranks.
        layout: gives this process's place once the strategy is set up.
    """

    is_judged: ClassVar[bool] = False  # the verdicts of pairs never change
    is_fresh: ClassVar[bool] = False

    pairs: Sequence[Pair]
    stream: PromptStream
    batch_size: int
    layout: Callable[[], Layout]

    def collect(self, iteration: int, watch: Stopwatch) -> list[ScoredSample]:
        """This rank's share of the next pairs; a chosen response scores 1, a rejected one -1."""
        drawn = share_of_rank(self.stream.take(self.batch_size), self.layout())
        return [
            ScoredSample(_renamed(sample, 2 * counter + place, counter), Score(value))
            for counter, row in drawn
            for place, (sample, value) in enumerate(((self.pairs[row].chosen, 1.0), (self.pairs[row].rejected, -1.0)))
        ]


def _renamed(sample: Sample, sample_id: int, group_id: int) -> Sample:
    return replace(sample, sample_id=sample_id, group_id=group_id)


def share_of_rank(items: Sequence[T], layout: Layout) -> list[T]:
    """Every n-th item for n token ranks, so that long and short neighbours spread over them.

    Ranks that share rows in training divide the sampling of whole responses as well; samples then move to every rank
    that trains on them.
    """
    return list(items[layout.token_rank :: layout.token_ranks])
