"""Held-out rows with given responses, under the loss that is trained with: pairs to rank, demonstrations to predict.

They go the way of training samples (plan, reference scores, micro-batches, one reduction), so the numbers are as
independent of the cut. That way is gone once; later evaluations only ask the model again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from rlmodule.core.evaluations import Evaluation
from rlmodule.core.metrics import Metric, Metrics, merge
from rlmodule.core.types import StepTotals
from rlmodule.evaluation import VALIDATION
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.sources import Source
from rlmodule.experience.timer import Timer
from rlmodule.training.reduction import reduce_metrics

LOSS = f"{VALIDATION}/loss"
MAX_EXPONENT = 700.0  # exp() overflows float64 near 709


@dataclass(frozen=True, eq=False)
class OfflineEvaluator(ABC):
    """Base of what is asked of given responses.

    Args:
        source: gives this rank's share of all held-out rows.
        make: builds the experience maker once the strategy is set up; its mini-batches hold all rows at once.
        model: name of the model that trains.
    """

    best_metric: ClassVar[str]
    best_mode: ClassVar[str]
    loss_agg_mode: ClassVar[str]  # the mean that the numbers are

    source: Source
    make: Callable[[], ExperienceMaker]
    model: str

    def __call__(self) -> Evaluation:
        """What is said of the rows."""
        return Evaluation(self.described(self.means()))

    def described(self, means: Mapping[str, float]) -> dict[str, float]:
        """The means, and what follows from them."""
        return dict(means)

    def weight(self) -> int:
        """What the means are over: how many there are, over all ranks."""
        return sum(self._counted(share.totals) for share in self._iteration.sampler.remaining())

    @staticmethod
    @abstractmethod
    def _counted(totals: StepTotals) -> int:
        """What of a mini-batch the means are over."""

    def means(self) -> dict[str, float]:
        """The loss without what is added to it, and what it logs, as means over all rows; the same on every rank."""
        strategy = self._maker.scorer.strategy
        metrics = reduce_metrics(self._local_metrics(), strategy.layout, strategy.collectives)
        del metrics[f"{VALIDATION}/pg_loss"]  # the same as the loss
        return {name: metric.result for name, metric in metrics.items()}

    def _local_metrics(self) -> dict[str, Metric]:
        """Metrics of this rank's micro-batches, merged."""
        maker, iteration, scorer = self._maker, self._iteration, self._maker.scorer
        objective, parts = scorer.objective.alone(VALIDATION, self.loss_agg_mode), list[Metrics]()
        for share in iteration.sampler.remaining():
            mini_batch = maker.packed(iteration.experience, share).to(scorer.device)
            parts += scorer.row_limit.evaluate(
                scorer.strategy, self.model, mini_batch.micro_batches, objective, mini_batch.totals
            )
        return merge(parts)

    @cached_property
    def _maker(self) -> ExperienceMaker:
        return self.make()

    @cached_property
    def _iteration(self) -> Iteration:
        timer = Timer()
        return self._maker(lambda: self.source.collect(0, timer), timer)


class PairEvaluator(OfflineEvaluator):
    """Held-out pairs: how many are told apart, and how clearly. Means over pairs (``ops/pairs.py``)."""

    best_metric: ClassVar[str] = f"{VALIDATION}/pair_accuracy"
    best_mode: ClassVar[str] = "max"
    loss_agg_mode: ClassVar[str] = "prompt-mean"

    @staticmethod
    def _counted(totals: StepTotals) -> int:
        return totals.groups


class DemonstrationEvaluator(OfflineEvaluator):
    """Held-out demonstrations: how well their tokens are predicted."""

    best_metric: ClassVar[str] = LOSS
    best_mode: ClassVar[str] = "min"
    loss_agg_mode: ClassVar[str] = "token-mean"

    def described(self, means: Mapping[str, float]) -> dict[str, float]:
        """``val/loss``, nats per trained token, and ``val/perplexity``, its exponential."""
        return {**means, f"{VALIDATION}/perplexity": math.exp(min(means[LOSS], MAX_EXPONENT))}

    @staticmethod
    def _counted(totals: StepTotals) -> int:
        return totals.tokens


@dataclass(frozen=True, eq=False)
class SeveralSets:
    """Held-out rows in several validation sets: the numbers of all together, and ``val/<set>/*`` of each.

    Args:
        sets: name -> its evaluator, all of one class.
    """

    sets: Mapping[str, OfflineEvaluator]

    @property
    def best_metric(self) -> str:
        """Of all sets together."""
        return self._first.best_metric

    @property
    def best_mode(self) -> str:
        """That of each set."""
        return self._first.best_mode

    def __call__(self) -> Evaluation:
        """Ask each set once; the mean over all is that of their means, by what each has."""
        means = {name: of_set.means() for name, of_set in self.sets.items()}
        weights = {name: of_set.weight() for name, of_set in self.sets.items()}
        total = sum(weights.values())
        together = {
            metric: math.fsum(of_set[metric] * weights[name] for name, of_set in means.items()) / total
            for metric in means[next(iter(means))]
        }
        found = self._first.described(together)
        for name, of_set in self.sets.items():
            described = of_set.described(means[name]).items()
            found |= {f"{VALIDATION}/{name}/{key.removeprefix(f'{VALIDATION}/')}": value for key, value in described}
        return Evaluation(found)

    @property
    def _first(self) -> OfflineEvaluator:
        return next(iter(self.sets.values()))
