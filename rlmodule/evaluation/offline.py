"""Held-out rows with given responses, under the loss that is trained with: pairs to rank, demonstrations to predict.

They go the way of training samples (plan, reference scores, micro-batches, one reduction), so the numbers are as
independent of the cut. That way is gone once; later evaluations only ask the model again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from rlmodule.core.evaluations import Evaluation
from rlmodule.core.metrics import Metric, Metrics, merge
from rlmodule.evaluation import VALIDATION
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.sources import Source
from rlmodule.experience.timer import Timer
from rlmodule.training.reduction import reduce_metrics

LOSS = f"{VALIDATION}/loss"
MAX_EXPONENT = 700.0  # exp() overflows float64 near 709


@dataclass(frozen=True, eq=False)
class OfflineEvaluator:
    """Base of what is asked of given responses.

    Args:
        source: gives this rank's share of all held-out rows.
        make: builds the experience maker once the strategy is set up; its mini-batches hold all rows at once.
        model: name of the model that trains.
    """

    loss_agg_mode: ClassVar[str]  # the mean that the numbers are

    source: Source
    make: Callable[[], ExperienceMaker]
    model: str

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
    """Held-out pairs: how many are told apart, and how clearly."""

    best_metric: ClassVar[str] = f"{VALIDATION}/pair_accuracy"
    best_mode: ClassVar[str] = "max"
    loss_agg_mode: ClassVar[str] = "prompt-mean"

    def __call__(self) -> Evaluation:
        """Means over pairs: the loss, and what it says of pairs (``ops/pairs.py``)."""
        return Evaluation(self.means())


class DemonstrationEvaluator(OfflineEvaluator):
    """Held-out demonstrations: how well their tokens are predicted."""

    best_metric: ClassVar[str] = LOSS
    best_mode: ClassVar[str] = "min"
    loss_agg_mode: ClassVar[str] = "token-mean"

    def __call__(self) -> Evaluation:
        """``val/loss``, nats per trained token, and ``val/perplexity``, its exponential."""
        metrics = self.means()
        return Evaluation(metrics | {f"{VALIDATION}/perplexity": math.exp(min(metrics[LOSS], MAX_EXPONENT))})
