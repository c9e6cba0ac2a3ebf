"""1 for an expression that uses each number once and reaches the target, else 0. The reward of
``environments/countdown.py``.

The response is parsed, never evaluated as code: numbers joined by + and -, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS

NUMBER = "(?:0|[1-9][0-9]{0,8})"  # ASCII digits, no leading zero; short enough that sums stay small
EXPRESSION = re.compile(f"{NUMBER}(?: *[+-] *{NUMBER})*")


@REWARDS.register
@dataclass(frozen=True)
class Countdown:
    """Needs rows with the target as answer and the numbers to use in a column of their own."""

    numbers_key: str = "numbers"  # column with the list of numbers
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = False

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order; the diagnostic ``valid`` is 1 where the expression uses the right numbers."""
        return [self._score(sample) for sample in samples]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row lacks: a target, or the numbers to reach it with."""
        try:
            self._read(answer, columns)
        except (KeyError, TypeError, ValueError):
            return (
                f"reward=countdown needs a whole number as answer and a list of them as '{self.numbers_key}', "
                f"found answer={answer!r} and the columns {', '.join(columns) or 'none'}"
            )
        return None

    def _score(self, sample: Sample) -> RewardResult:
        target, numbers = self._read(sample.prompt.answer, sample.prompt.meta)
        terms = terms_of(sample.text)
        is_valid = terms is not None and sorted(map(abs, terms)) == sorted(numbers)
        diagnostics = {"valid": float(is_valid)}
        if sample.finish_reason == "length":
            return RewardResult(self.truncated, diagnostics=diagnostics)
        hits = terms is not None and is_valid and sum(terms) == target
        return RewardResult(float(hits), diagnostics=diagnostics)

    def _read(self, answer: str | None, columns: Mapping[str, Any]) -> tuple[int, list[int]]:
        return int(answer or ""), [int(number) for number in columns[self.numbers_key]]


def terms_of(text: str) -> list[int] | None:
    """The signed terms of a sum such as ``3+7-2``, or None when ``text`` is anything else."""
    text = text.strip()
    if not EXPRESSION.fullmatch(text):
        return None
    return [int(term) for term in re.findall("[+-]?[0-9]+", text.replace(" ", ""))]
