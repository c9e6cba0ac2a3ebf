"""The weighted sum of several rewards: ``reward=[math,format]``. Every one is logged, and is a component of the sum.

Leaves out how a list on the command line becomes a section (``cli.py``) and a section an object
(``parts/composite.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlmodule.core.contract import AnswerReward, Reward
from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS
from rlmodule.rewards.parts.composite import CompositeReward


@dataclass(frozen=True)
class Weights:
    """The keys of the sum itself; beside them its section holds a section for each reward."""

    weights: dict[str, float] = field(default_factory=dict)  # reward -> factor; 1 for one that is not named

    @property
    def named(self) -> tuple[str, ...]:
        """Rewards that need no section: none."""
        return ()


@REWARDS.register
@dataclass(frozen=True)
class Weighted(CompositeReward):
    """Sum of weight x reward. Unscored where one of the rewards that count leaves a response unscored.

    A reward of weight 0 is logged and counts for nothing. Components are the rewards as they are, before weighting.
    What a reward itself logs is logged as ``NAME/...``; what it counts is added up over all of them.
    """

    settings_class: ClassVar[type] = Weights
    takes_sums: ClassVar[bool] = False

    parts: Mapping[str, Reward] = field(default_factory=dict)  # by name, in the order in which they are asked
    weights: Mapping[str, float] = field(default_factory=dict)  # as in Weights

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError(
                key="name",
                got="weighted",
                because="a sum needs rewards to add up",
                fix="Write reward=[math,format], which chooses it",
            )
        for name in sorted(set(self.weights) - set(self.parts)):
            raise ConfigError(
                key=f"weights.{name}",
                got=self.weights[name],
                because="the sum has no such reward",
                fix=did_you_mean(name, self.parts),
            )

    @property
    def knows_one_response(self) -> bool:
        """Whether one of the rewards takes the answer of a row for the only right response."""
        return any(part.knows_one_response for part in self.parts.values())

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One sum per sample, in order."""
        results = {name: part(samples) for name, part in self.parts.items()}
        return [self._sum({name: of_all[i] for name, of_all in results.items()}) for i in range(len(samples))]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row lacks for the first reward that lacks anything."""
        found = (part.missing_fields(answer, columns) for part in self.parts.values())
        return next((missing for missing in found if missing is not None), None)

    def answer_of(self, sample: Sample) -> str | None:
        """What the first part that counts and reads answers says; None where there is no such part."""
        counting = (part for name, part in self.parts.items() if self.weights.get(name, 1.0))
        return next((part.answer_of(sample) for part in counting if isinstance(part, AnswerReward)), None)

    def _sum(self, results: Mapping[str, RewardResult]) -> RewardResult:
        weights = {name: self.weights.get(name, 1.0) for name in results}
        values = {name: result.value for name, result in results.items() if result.value is not None}
        counts: Counter[str] = Counter()
        for result in results.values():
            counts.update(result.counts)
        failures = [f"reward {name}: {result.failure}" for name, result in results.items() if result.failure]
        is_scored = all(name in values for name, weight in weights.items() if weight)
        return RewardResult(
            sum(weights[name] * value for name, value in values.items()) if is_scored else None,
            parts=values,
            diagnostics={
                f"{name}/{key}": value
                for name, result in results.items()
                for key, value in {**result.diagnostics, **result.parts}.items()
            },
            counts=dict(counts),
            failure=failures[0] if failures else None,
        )
