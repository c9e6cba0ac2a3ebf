"""1 for a response in which a regular expression is found, else 0. Leaves out the row's answer: ``reward=exact_match``.

Python's ``re``, on the whole response, in child processes that are killed when they take too long: a pattern such as
``(a+)+b`` takes longer than the age of the universe on forty letters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.core.sandbox.pool import Outcome, Pool, child_file
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS

PLACES = {"anywhere": "search", "start": "match", "whole": "fullmatch"}


@REWARDS.register
@dataclass(frozen=True)
class Regex:
    """A response on which the expression takes too long scores 0 and counts in ``reward/timed_out``."""

    pattern: str  # regular expression of Python's re; (?i) in front ignores case, (?s) lets . match line breaks
    where: str = "anywhere"  # where it has to match: anywhere, start, whole
    invert: bool = False  # 1 where it is NOT found
    timeout_seconds: float = 2.0  # for one response
    num_workers: int = 2  # child processes, on each rank that scores
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("where", self.where, PLACES)
        more_than("timeout_seconds", self.timeout_seconds, 0)
        at_least("num_workers", self.num_workers, 1)
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(
                key="pattern", got=self.pattern, because=f"it is no regular expression: {error}", fix="Correct it"
            ) from None

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        whole = [sample for sample in samples if sample.finish_reason != "length"]
        method = PLACES[self.where]
        calls = [{"pattern": self.pattern, "method": method, "text": sample.text} for sample in whole]
        outcomes = iter(self._pool.map(calls) if calls else [])
        return [
            RewardResult(self.truncated) if sample.finish_reason == "length" else self._result(next(outcomes))
            for sample in samples
        ]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """Nothing: the row is not read."""
        return None

    def _result(self, outcome: Outcome) -> RewardResult:
        hits = outcome.fault is None and bool(outcome.result) != self.invert
        return RewardResult(float(hits), counts={"timed_out": float(outcome.timed_out)})

    @cached_property
    def _pool(self) -> Pool:
        return Pool(
            f"{child_file('rlmodule.rewards.parts.regex_search')}:is_found", self.num_workers, self.timeout_seconds
        )
