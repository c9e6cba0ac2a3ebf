"""Where samples come from: rollouts of the current policy, or demonstrations. Both feed the same planner and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from rlmodule.core.contract import Layout, Reward, RolloutEngine, SampleRequest
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import Prompt, Sample, Score, ScoredSample
from rlmodule.data.stream import PromptStream
from rlmodule.experience import Stopwatch

T = TypeVar("T")
VALIDATION_SEED = 0  # greedy sampling draws nothing; the key only has to be there


class Source(Protocol):
    """Gives this rank's share of an iteration's samples."""

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
        scored = list(zip(samples, scores, strict=True))
        count = len(mine) * self.n
        baselines = {sample.group_id: score.value for sample, score in scored[count:]}
        return [ScoredSample(sample, score, baselines.get(sample.group_id)) for sample, score in scored[:count]]

    def validate(self, prompts: Sequence[Prompt]) -> list[ScoredSample]:
        """Greedy answers to this rank's share of held-out prompts, with their verdicts."""
        mine = share_of_rank(list(enumerate(prompts)), self.layout())
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

    samples: Sequence[Sample]
    stream: PromptStream
    batch_size: int
    layout: Callable[[], Layout]

    def collect(self, iteration: int, watch: Stopwatch) -> list[ScoredSample]:
        """This rank's share of the next demonstrations; each is worth imitating, so each scores 1."""
        if not self.samples:
            raise TrainingError("there are no demonstrations to imitate")
        drawn = share_of_rank(self.stream.take(self.batch_size), self.layout())
        return [ScoredSample(_renamed(self.samples[row], counter), Score(1.0)) for counter, row in drawn]


def _renamed(sample: Sample, counter: int) -> Sample:
    return replace(sample, sample_id=counter, group_id=counter)


def share_of_rank(items: Sequence[T], layout: Layout) -> list[T]:
    """Every n-th item for n token ranks, so that long and short neighbours spread over them.

    Ranks that share rows in training divide the sampling of whole responses as well; samples then move to every rank
    that trains on them.
    """
    return list(items[layout.token_rank :: layout.token_ranks])
