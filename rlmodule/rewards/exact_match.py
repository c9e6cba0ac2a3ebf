"""1 for the response that is the answer, letter by letter, else 0. Leaves out mathematics: ``0.5`` is not ``1/2``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmodule.core.errors import DataError
from rlmodule.core.types import Sample, Score
from rlmodule.rewards import REWARDS


@REWARDS.register
@dataclass(frozen=True)
class ExactMatch:
    """Compare the response with the ground truth of its row."""

    strip: bool = True  # spaces and line breaks around either do not count
    ignore_case: bool = False
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        """One score per sample, in order.

        Raises:
            DataError: a row has no answer to compare with.
        """
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        answer = sample.prompt.answer
        if answer is None:
            raise DataError(
                place=f"row {sample.prompt.row + 1} of {sample.prompt.source or 'the data'}",
                because="it has no answer, and reward=exact_match compares with one",
                fix="Set data.answer_key to the column with the ground truth",
            )
        if sample.finish == "length":
            return Score(self.truncated)
        return Score(float(self._normal(sample.text) == self._normal(answer)))

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
