"""1 for a response that is the answer, letter by letter, else 0. Leaves out mathematics: ``0.5`` is not ``1/2``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS
from rlmodule.rewards.parts.answers import right_answers


@REWARDS.register
@dataclass(frozen=True)
class ExactMatch:
    """Compare the response with the ground truth of its row; where that is a list, with each entry of it."""

    strip: bool = True  # spaces and line breaks around either do not count
    ignore_case: bool = False
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = True
    runs_apart: ClassVar[bool] = False

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        return [self._score(sample) for sample in samples]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row lacks: an answer to compare with."""
        return "it has no answer, and reward=exact_match compares with one" if answer is None else None

    def answer_of(self, sample: Sample) -> str | None:
        """The whole response; None where it was cut."""
        return None if sample.finish_reason == "length" else self._normal(sample.text)

    def _score(self, sample: Sample) -> RewardResult:
        if sample.finish_reason == "length":
            return RewardResult(self.truncated)
        right = {self._normal(answer) for answer in right_answers(sample.prompt)}
        return RewardResult(float(self._normal(sample.text) in right))

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
