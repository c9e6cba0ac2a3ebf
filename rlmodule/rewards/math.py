r"""1 for a response whose answer is mathematically equal to the right one, else 0. The library is math-verify.

The answer is looked for in the last ``\boxed{}``, then after ``####`` or "answer is", then it is the last formula or
number (``parts/answers.py``). Expressions are compared in child processes that are killed when they take too long:
math-verify's own time limits are signals, which need a main thread and do not interrupt C code (huggingface/Math-Verify
#50, #55; verl #5635). Leaves out proofs, and units: 10 cm and 10 m are the same answer.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rlmodule.core.config import at_least, more_than
from rlmodule.core.errors import DependencyError
from rlmodule.core.sandbox.pool import Outcome, Pool, child_file
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS
from rlmodule.rewards.parts.answers import final_answer, last_boxed, plain, possible_answers, right_answers, true_answer

# Answers of which math-verify need not be asked whether it can read them: most of a file's rows.
SURE = re.compile(
    r"[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,50})(?:\.[0-9]{1,50})?"
    r"|-?\\[dt]?frac\{-?[0-9]{1,9}\}\{[1-9][0-9]{0,8}\}|-?[0-9]{0,9}(?:\\sqrt\{[0-9]{1,9}\}|\\pi|[a-zA-Z])"
)


@REWARDS.register
@dataclass(frozen=True)
class Math:
    """Needs a row whose answer, or whose worked solution, math-verify can read; of a list of answers one is enough.

    Diagnostics: ``answered`` is 1 where an answer was found that means something.
    """

    boxed_only: bool = False  # an answer outside of \boxed{} is none
    timeout_seconds: float = 10.0  # for one comparison; one that takes longer scores 0 and counts in reward/timed_out
    num_workers: int = 4  # child processes, on each rank that scores
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        more_than("timeout_seconds", self.timeout_seconds, 0)
        at_least("num_workers", self.num_workers, 1)
        if importlib.util.find_spec("math_verify") is None:
            raise DependencyError(package="math-verify", needed_by="reward=math", extra="math")

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        whole = [sample for sample in samples if sample.finish_reason != "length"]
        graded = iter(self._grade(whole))
        return [
            RewardResult(self.truncated) if sample.finish_reason == "length" else next(graded) for sample in samples
        ]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row lacks: an answer that can be read."""
        if answer is None:
            return "it has no answer, and reward=math compares with one"
        golds = [true_answer(possible) for possible in possible_answers(answer)]
        if any(SURE.fullmatch(gold) for gold in golds):
            return None
        [outcome] = self._pool.map([{"golds": golds}])
        if outcome.fault is None and outcome.result["readable"]:
            return None
        because = f" ({outcome.fault.splitlines()[-1]})" if outcome.fault else ""
        return f"reward=math cannot read its answer {golds[0][:200]!r}{because}"

    def answer_of(self, sample: Sample) -> str | None:
        """The answer of a response as it is written, without spaces; None where there is none or it was cut."""
        answer = "" if sample.finish_reason == "length" else self._answer(sample.text)
        return "".join(answer.split()) or None

    def _grade(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Compare what differs from the right answers as text; several samples in one call of the pool."""
        answers = [self._answer(sample.text) for sample in samples]
        golds = [[true_answer(answer) for answer in right_answers(sample.prompt)] for sample in samples]
        open_ones = [i for i, answer in enumerate(answers) if answer and answer not in golds[i]]
        outcomes = self._pool.map([{"golds": golds[i], "answer": answers[i]} for i in open_ones]) if open_ones else []
        graded = dict(zip(open_ones, outcomes, strict=True))
        return [
            _result(graded[i]) if i in graded else _result(Outcome({"score": bool(answer), "readable": bool(answer)}))
            for i, answer in enumerate(answers)
        ]

    def _answer(self, text: str) -> str:
        return (last_boxed(plain(text)) or "") if self.boxed_only else final_answer(text)

    @cached_property
    def _pool(self) -> Pool:
        return Pool(f"{child_file('rlmodule.rewards.parts.math_grader')}:grade", self.num_workers, self.timeout_seconds)


def _result(outcome: Outcome) -> RewardResult:
    """What cannot be compared in time, or ends the process that compares, is not the answer."""
    if outcome.fault is not None:
        return RewardResult(0.0, diagnostics={"answered": 1.0}, counts={"timed_out": float(outcome.timed_out)})
    score, readable = outcome.result["score"], outcome.result["readable"]
    return RewardResult(float(score), diagnostics={"answered": float(readable)}, counts={"timed_out": 0.0})
