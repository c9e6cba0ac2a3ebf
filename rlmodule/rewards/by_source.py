"""The reward of each row by where the row is from, for files that mix data: ``reward=by_source``.

Leaves out how a section becomes an object (``parts/composite.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlmodule.core.contract import AnswerReward, Reward
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS
from rlmodule.rewards.parts.composite import CompositeReward


@dataclass(frozen=True)
class Sources:
    """The keys of the choice itself; beside them its section may hold a section for a reward."""

    sources: dict[str, str] = field(default_factory=dict)  # data source -> reward; math+format is their sum
    otherwise: str | None = None  # reward of other sources; null refuses their rows

    @property
    def named(self) -> tuple[str, ...]:
        """Rewards that it chooses from; one without a section has its default settings."""
        names = [*self.sources.values(), *([] if self.otherwise is None else [self.otherwise])]
        return tuple(dict.fromkeys(map(str, names)))


@REWARDS.register
@dataclass(frozen=True)
class BySource(CompositeReward):
    """Every sample gets the reward of its row's source, as that reward says it.

    Components and other numbers that only some of the rewards have are means over the samples that have them.
    """

    settings_class: ClassVar[type] = Sources
    takes_sums: ClassVar[bool] = True

    parts: Mapping[str, Reward] = field(default_factory=dict)  # by name
    sources: Mapping[str, str] = field(default_factory=dict)  # as in Sources
    otherwise: str | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError(
                key="sources",
                got="{}",
                because="no data source has a reward",
                fix="Set reward.sources={gsm8k:math,mbpp:code}, or reward.otherwise=math",
            )
        unasked = set(self.parts) - {*map(str, self.sources.values()), str(self.otherwise)}
        if unasked:
            raise ConfigError(
                key=min(unasked),
                got="a section",
                because="no data source has this reward",
                fix="Name it in reward.sources or reward.otherwise, or leave it out",
            )

    @property
    def knows_one_response(self) -> bool:
        """Whether one of the rewards takes the answer of a row for the only right response."""
        return any(part.knows_one_response for part in self.parts.values())

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One result per sample, in order; each reward is asked once, for all of its samples."""
        chosen = [self._name(sample.prompt.source) for sample in samples]
        results: dict[int, RewardResult] = {}
        for name, part in self.parts.items():
            mine = [i for i, wanted in enumerate(chosen) if wanted == name]
            if mine:
                results |= dict(zip(mine, part([samples[i] for i in mine]), strict=True))
        return [results.get(i, RewardResult(None, failure=self._unknown(s))) for i, s in enumerate(samples)]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row lacks: a source that has a reward, or what that reward needs."""
        source = str(columns.get("source", ""))
        name = self._name(source)
        if name is None:
            return f"it is from {source or 'no source'!r}, and reward.sources has a reward for {self._known} only"
        return self.parts[name].missing_fields(answer, columns)

    def answer_of(self, sample: Sample) -> str | None:
        """What the reward of its source says; None where that one reads no answers."""
        part = self.parts.get(self._name(sample.prompt.source) or "")
        return part.answer_of(sample) if isinstance(part, AnswerReward) else None

    def _name(self, source: str) -> str | None:
        return self.sources.get(source, self.otherwise)

    def _unknown(self, sample: Sample) -> str:
        return f"sample {sample.sample_id}: no reward for source {sample.prompt.source!r}"

    @property
    def _known(self) -> str:
        return ", ".join(sorted(self.sources))
