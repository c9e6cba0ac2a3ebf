"""What models are asked between updates, of rows that are never trained on: answers to prompts, verdicts on pairs.

Leaves out when (``callbacks/validation.py``) and where the rows come from (``run/datasets.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from rlmodule.core.contract import Reward, RolloutEngine, Strategy
from rlmodule.core.metrics import Metric, Metrics, merge
from rlmodule.core.types import Prompt, ScoredSample
from rlmodule.experience.episodes import EpisodeRequest, EpisodeRunner
from rlmodule.experience.failures import check_not_all_failed
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.iteration_metrics import answer_metrics
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.sample_info import gather_sample_info
from rlmodule.experience.sources import Source, share_of_rank, with_rewards
from rlmodule.experience.timer import Timer
from rlmodule.training.reduction import reduce_metrics

VALIDATION = "val"  # first part of the names of what examinations say
VALIDATION_SEED = 0  # greedy sampling draws nothing; the key only has to be there


@dataclass(frozen=True, eq=False)
class PromptEvaluator:
    """Greedy episodes about held-out rows, with their rewards.

    Args:
        prompts: the rows, the same on every rank.
        episodes: runs them.
        engine: gives the rollout engine, with the current weights, once the strategy is set up.
        reward: reward function of episodes that end without a reward of their own.
        strategy: where ranks are.
    """

    accuracy: ClassVar[str] = f"{VALIDATION}/accuracy"

    prompts: Sequence[Prompt]
    episodes: EpisodeRunner
    engine: Callable[[], RolloutEngine]
    reward: Reward
    strategy: Strategy

    def __call__(self) -> dict[str, float]:
        """Mean reward and length of the answers."""
        _, sample_info = gather_sample_info(self.answers, self.strategy.collectives)
        check_not_all_failed(sample_info, "the validation")
        return answer_metrics(sample_info)

    def answers(self) -> list[ScoredSample]:
        """This rank's share of the answers."""
        mine = share_of_rank(list(enumerate(self.prompts)), self.strategy.layout)
        requests = [
            EpisodeRequest(prompt, sample_id=place, group_id=place, seed=VALIDATION_SEED, greedy=True)
            for place, prompt in mine
        ]
        # Also without a share of its own: every rank takes part when a sharded model is made whole.
        return with_rewards(self.episodes.run(self.engine(), requests), self.reward)


@dataclass(frozen=True, eq=False)
class PairEvaluator:
    """Held-out pairs under the loss that is trained with: how many are told apart, and how clearly.

    They go the way of training pairs (plan, reference scores, micro-batches, one reduction), so the numbers are as
    independent of the cut. That way is gone once; later examinations only ask the model again.

    Args:
        source: gives this rank's share of all held-out pairs.
        make: builds the experience maker once the strategy is set up; its mini-batches hold all pairs at once.
        model: name of the model that trains.
    """

    accuracy: ClassVar[str] = f"{VALIDATION}/pair_accuracy"

    source: Source
    make: Callable[[], ExperienceMaker]
    model: str

    def __call__(self) -> dict[str, float]:
        """Means over pairs: the loss without what is added to it, and what it says of pairs (``ops/pairs.py``)."""
        strategy = self._maker.scorer.strategy
        metrics = reduce_metrics(self._local_metrics(), strategy.layout, strategy.collectives)
        del metrics[f"{VALIDATION}/pg_loss"]  # the same as the loss
        return {name: metric.result for name, metric in metrics.items()}

    def _local_metrics(self) -> dict[str, Metric]:
        """Metrics of this rank's micro-batches, merged."""
        maker, iteration, scorer = self._maker, self._iteration, self._maker.scorer
        objective, parts = scorer.objective.alone(VALIDATION), list[Metrics]()
        for share in iteration.sampler.remaining():
            mini_batch = maker.packed(iteration.experience, share).to(scorer.device)
            parts += scorer.strategy.evaluate(self.model, mini_batch.micro_batches, objective, mini_batch.totals)
        return merge(parts)

    @cached_property
    def _maker(self) -> ExperienceMaker:
        return self.make()

    @cached_property
    def _iteration(self) -> Iteration:
        timer = Timer()
        return self._maker(lambda: self.source.collect(0, timer), timer)
