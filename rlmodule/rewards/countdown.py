"""1 for an expression that uses each number once and reaches the target, else 0. The judge of ``tasks/countdown.py``.

The response is parsed, never evaluated as code: numbers joined by + and -, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlmodule.core.errors import DataError
from rlmodule.core.types import Prompt, Sample, Score
from rlmodule.rewards import REWARDS

NUMBER = "(?:0|[1-9][0-9]{0,8})"  # ASCII digits, no leading zero; short enough to add without a thought
EXPRESSION = re.compile(f"{NUMBER}(?: *[+-] *{NUMBER})*")


@REWARDS.register
@dataclass(frozen=True)
class Countdown:
    """Needs rows with the target as answer and the numbers to use in a column of their own."""

    numbers_key: str = "numbers"  # column with the list of numbers
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        """One score per sample, in order; part ``valid`` is 1 where the expression uses the right numbers.

        Raises:
            DataError: a row has no target or no numbers.
        """
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        target, numbers = self._read(sample.prompt)
        terms = terms_of(sample.text)
        is_valid = terms is not None and sorted(map(abs, terms)) == sorted(numbers)
        parts = {"valid": float(is_valid)}
        if sample.finish == "length":
            return Score(self.truncated, parts)
        return Score(float(terms is not None and is_valid and sum(terms) == target), parts)

    def _read(self, prompt: Prompt) -> tuple[int, list[int]]:
        try:
            return int(prompt.answer or ""), [int(number) for number in prompt.meta[self.numbers_key]]
        except (KeyError, TypeError, ValueError):
            raise DataError(
                place=f"row {prompt.row + 1} of {prompt.source or 'the data'}",
                because=f"reward=countdown needs a whole number as answer and a list of them as '{self.numbers_key}', "
                f"found answer={prompt.answer!r} and the columns {', '.join(prompt.meta) or 'none'}",
                fix="Use data.task=countdown, or set reward.numbers_key and data.answer_key",
            ) from None


def terms_of(text: str) -> list[int] | None:
    """The signed terms of a sum such as ``3+7-2``, or None when ``text`` is anything else."""
    text = text.strip()
    if not EXPRESSION.fullmatch(text):
        return None
    return [int(term) for term in re.findall("[+-]?[0-9]+", text.replace(" ", ""))]
