r"""1 for a response whose last number is the right one, else 0.

The number is the last one in what ``\boxed{}``, ``####`` or "answer is" mark as the answer, else of the whole response
(``parts/answers.py``). Fractions, thousands separators and scientific notation are read; currency and percent signs do
not count. Leaves out formulas: ``reward=math``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from rlmodule.core.config import at_least
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS
from rlmodule.rewards.parts.answers import final_answer, last_number, possible_answers, right_answers, true_answer


@REWARDS.register
@dataclass(frozen=True)
class Numeric:
    """Needs a row with a number as answer; of a list of numbers one is enough. Exact arithmetic, no rounding.

    Diagnostics: ``answered`` is 1 where the response has a number.
    """

    tolerance: float = 0.0  # largest difference that still counts as equal
    relative_tolerance: float = 0.0  # the same as a share of the right number; the larger of the two holds
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least("tolerance", self.tolerance, 0)
        at_least("relative_tolerance", self.relative_tolerance, 0)

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        return [self._score(sample) for sample in samples]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row lacks: a number."""
        if answer is None:
            return "it has no answer, and reward=numeric compares with one"
        if all(last_number(true_answer(possible)) is None for possible in possible_answers(answer)):
            return f"reward=numeric finds no number in its answer {answer[:200]!r}"
        return None

    def answer_of(self, sample: Sample) -> str | None:
        """The number of a response, written the same for equal numbers; None where there is none or it was cut."""
        said = None if sample.finish_reason == "length" else last_number(final_answer(sample.text))
        return None if said is None else str(said)

    def _score(self, sample: Sample) -> RewardResult:
        if sample.finish_reason == "length":
            return RewardResult(self.truncated)
        said = last_number(final_answer(sample.text))
        right = [last_number(true_answer(answer)) for answer in right_answers(sample.prompt)]
        hits = said is not None and any(number is not None and self._is_near(said, number) for number in right)
        return RewardResult(float(hits), diagnostics={"answered": float(said is not None)})

    def _is_near(self, said: Fraction, right: Fraction) -> bool:
        allowed = max(Fraction(self.tolerance), Fraction(self.relative_tolerance) * abs(right))
        return abs(said - right) <= allowed
