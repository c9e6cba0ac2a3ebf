"""The scorer of a Reasoning Gym task (github.com/open-thought/reasoning-gym), by the name in the row.

Rows are those of ``reasoning_gym.create_dataset`` as JSON lines: ``question``, ``answer`` and ``metadata`` with
``source_dataset``. Scorers run in child processes. Leaves out making rows.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rlmodule.core.config import at_least, more_than
from rlmodule.core.errors import DependencyError, did_you_mean
from rlmodule.core.sandbox.pool import START_SECONDS, Outcome, Pool, child_file
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS
from rlmodule.rewards.parts.answers import tagged


@REWARDS.register
@dataclass(frozen=True)
class ReasoningGym:
    """Scores as the task gives them, 0 to 1; many give a hundredth for a wrong answer that has the right form."""

    metadata_key: str = "metadata"  # column with what the scorer needs (a mapping, or JSON text of one)
    dataset_key: str = "source_dataset"  # where the task's name is: a key of the metadata, or a column
    answer_tag: str = "answer"  # the last <answer>...</answer> is scored; empty: the whole response
    tag_only: bool = False  # a response without the tag scores 0; false: all of it is its answer
    timeout_seconds: float = 10.0  # for one response; one that takes longer is unscored and counts in reward/timed_out
    num_workers: int = 2  # child processes, on each rank that scores
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        more_than("timeout_seconds", self.timeout_seconds, 0)
        at_least("num_workers", self.num_workers, 1)
        if importlib.util.find_spec("reasoning_gym") is None:
            raise DependencyError(package="reasoning-gym", needed_by="reward=reasoning_gym", extra="reasoning_gym")

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        answers = [None if sample.finish_reason == "length" else self._answer(sample.text) for sample in samples]
        scored = [i for i, answer in enumerate(answers) if answer is not None]
        calls = [self._call(samples[i], str(answers[i])) for i in scored]
        outcomes = dict(zip(scored, self._pool.map(calls) if calls else [], strict=True))
        return [
            self._result(outcomes.get(i), is_cut=sample.finish_reason == "length") for i, sample in enumerate(samples)
        ]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row lacks: the name of a task."""
        try:
            metadata = self._metadata(columns)
        except ValueError as error:
            return f"its column '{self.metadata_key}' is no mapping: {error}"
        name = metadata.get(self.dataset_key, columns.get(self.dataset_key))
        if name is None:
            return (
                f"reward=reasoning_gym finds no task's name: '{self.dataset_key}' is neither in the column "
                f"'{self.metadata_key}' nor a column (reward.dataset_key)"
            )
        if name not in self._tasks:
            return f"Reasoning Gym has no task {name!r}. {did_you_mean(str(name), self._tasks)}".strip()
        return None

    def _answer(self, text: str) -> str | None:
        """What is scored; None where there is nothing to score."""
        found = tagged(text, self.answer_tag) if self.answer_tag else text
        return None if found is None and self.tag_only else text.strip() if found is None else found

    def _metadata(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        value = columns.get(self.metadata_key) or {}
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise ValueError(f"{value!r:.100}")
        return dict(value)

    def _call(self, sample: Sample, answer: str) -> dict[str, Any]:
        prompt = sample.prompt
        metadata = self._metadata(prompt.meta)
        entry = {"question": prompt.text, "answer": prompt.answer, "metadata": metadata}
        name = metadata.get(self.dataset_key, prompt.meta.get(self.dataset_key))
        return {"name": name, "answer": answer, "entry": entry}

    def _result(self, outcome: Outcome | None, *, is_cut: bool) -> RewardResult:
        if is_cut:
            return RewardResult(self.truncated)
        if outcome is None:
            return RewardResult(0.0, counts={"failed": 0.0, "timed_out": 0.0})
        counts = {"failed": float(outcome.fault is not None), "timed_out": float(outcome.timed_out)}
        return RewardResult(outcome.result, counts=counts, failure=outcome.fault)

    @cached_property
    def _tasks(self) -> frozenset[str]:
        [outcome] = self._pool.map([{"name": ""}])
        assert outcome.fault is None, outcome.fault
        return frozenset(outcome.result)

    @cached_property
    def _pool(self) -> Pool:
        return Pool(
            f"{child_file('rlmodule.rewards.parts.gym_scorer')}:score",
            self.num_workers,
            self.timeout_seconds,
            START_SECONDS,
        )
