"""Scores from a Python function of the user's, called the way this project, verl or TRL call theirs.

The function runs in child processes, which are killed when it hangs. **A sample it fails on is unscored**: it leaves
the statistics and the loss, and counts in ``reward/failed`` (``reward/timed_out`` when time was up). Failing on every
sample of a call stops the run. Leaves out what a function cannot see here: the other responses of the group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS
from rlmodule.rewards.parts.sandbox import LoadError, Outcome, Pool


def call_rlmodule(sample: Sample) -> dict[str, Any]:
    """Arguments ``response, answer, prompt, source, meta, finish_reason``."""
    prompt = sample.prompt
    return {
        "response": sample.text,
        "answer": prompt.answer,
        "prompt": prompt.text,
        "source": prompt.source,
        "meta": dict(prompt.meta),
        "finish_reason": sample.finish_reason,
    }


def call_verl(sample: Sample) -> dict[str, Any]:
    """Arguments ``data_source, solution_str, ground_truth, extra_info``.

    A ground truth that stood in verl's own column keeps its type; any other is a text.
    """
    prompt = sample.prompt
    reward_model = prompt.meta.get("reward_model")
    answer = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else prompt.answer
    return {
        "data_source": prompt.source,
        "solution_str": sample.text,
        "ground_truth": answer,
        "extra_info": dict(prompt.meta),
    }


def call_trl(sample: Sample) -> dict[str, Any]:
    """Arguments ``prompts, completions, completion_ids`` and every column of the row, each a list of one.

    Prompt and completion are turns where the row has turns, else texts.
    """
    meta = dict(sample.prompt.meta)
    turns = meta.pop("messages", None)
    said = sample.text if turns is None else [{"role": "assistant", "content": sample.text}]
    return {name: [value] for name, value in meta.items()} | {
        "prompts": [sample.prompt.text if turns is None else turns],
        "completions": [said],
        "completion_ids": [sample.response_ids.tolist()],
    }


CONVENTIONS: dict[str, Callable[[Sample], dict[str, Any]]] = {
    "rlmodule": call_rlmodule,
    "verl": call_verl,
    "trl": call_trl,
}


@REWARDS.register
@dataclass(frozen=True)
class Function:
    """One call per sample, everything by keyword.

    The function returns a number, a mapping with ``score`` (its other numbers are logged as ``reward/<key>``), or a
    list with one of them. None, NaN and infinity mean that the sample cannot be scored, which is no failure.
    """

    path: str  # package.module:function, or path/to/file.py:function
    style: str = "rlmodule"  # whose calling convention: rlmodule, verl, trl
    arguments: dict[str, Any] = field(default_factory=dict)  # more keyword arguments
    timeout_seconds: float = 10.0  # for one sample
    num_workers: int = 4  # child processes, on each rank that scores
    on_error: str = "unscored"  # what a failure on some samples does: unscored, or raise to stop the run

    knows_one_response: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("style", self.style, CONVENTIONS)
        one_of("on_error", self.on_error, ["unscored", "raise"])
        more_than("timeout_seconds", self.timeout_seconds, 0)
        at_least("num_workers", self.num_workers, 1)
        location, _, name = self.path.rpartition(":")
        if not location or not name:
            raise ConfigError(
                key="path",
                got=self.path,
                because="it does not say which function of which module",
                fix="Write package.module:function or path/to/file.py:function",
            )
        if location.endswith(".py") and not Path(location).is_file():
            raise ConfigError(
                key="path",
                got=self.path,
                because=f"no file {Path(location).resolve()}",
                fix="Correct it",
            )
        try:
            assert self._pool  # made here, so that a function nobody can import is found before a model is loaded
        except LoadError as error:
            raise ConfigError(
                key="path", got=self.path, because="it cannot be imported", fix=f"Its own words:\n{error}"
            ) from None

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order.

        Raises:
            TrainingError: the function failed on every sample, or on one while ``on_error`` is ``raise``.
        """
        call = CONVENTIONS[self.style]
        outcomes = self._pool.map([call(sample) | self.arguments for sample in samples])
        rewards = [_read(outcome) for outcome in outcomes]
        failed = [index for index, (_, fault) in enumerate(rewards) if fault is not None]
        if failed and (self.on_error == "raise" or len(failed) == len(samples)):
            first = samples[failed[0]]
            raise TrainingError(
                f"reward.path={self.path} failed on {len(failed)} of {len(samples)} samples. The first is sample "
                f"{first.sample_id} (row {first.prompt.row + 1} of {first.prompt.source or 'the data'}, response "
                f"{first.text[:80]!r}):\n{rewards[failed[0]][1]}"
            )
        return [score for score, _ in rewards]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """Nothing that could be known before it is called."""
        return None

    @cached_property
    def _pool(self) -> Pool:
        location, _, name = self.path.rpartition(":")
        if location.endswith(".py"):
            location = str(Path(location).resolve())
        return Pool(f"{location}:{name}", self.num_workers, self.timeout_seconds)


def _read(outcome: Outcome) -> tuple[RewardResult, str | None]:
    """The score of one call, and what went wrong if anything did."""
    value, parts, fault = None, dict[str, float](), outcome.fault
    if fault is None:
        try:
            value, parts = _read_result(outcome.result)
        except ValueError as error:
            fault = str(error)
    counts = {"failed": float(fault is not None), "timed_out": float(outcome.timed_out)}
    return RewardResult(value, parts | counts), fault


def _read_result(result: Any) -> tuple[float | None, dict[str, float]]:
    if isinstance(result, list) and len(result) == 1:
        return _read_result(result[0])
    if isinstance(result, Mapping) and "score" in result:
        value, _ = _read_result(result["score"])
        parts = {name: float(part) for name, part in result.items() if name != "score" and _is_finite(part)}
        return value, parts
    if result is None:
        return None, {}
    if isinstance(result, int | float):
        return (float(result) if _is_finite(result) else None), {}
    raise ValueError(f"it returned {result!r:.200}; a number, None or a mapping with 'score' was due")


def _is_finite(value: Any) -> bool:
    # The largest float, for whole numbers beyond it have no finite float either.
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
