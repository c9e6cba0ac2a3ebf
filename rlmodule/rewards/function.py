"""Scores from a Python function of the user's, called the way this project, verl, TRL or OpenRLHF call theirs.

The function runs in child processes, which are killed when it hangs. **A sample it fails on is unscored**: it leaves
the statistics and the loss, and counts in ``reward/failed`` (``reward/timed_out`` when time was up). Leaves out what a
function cannot see here: the other responses of the group; and the end of a run in which every sample fails
(``experience/failures.py``).
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
from rlmodule.core.sandbox.pool import LoadError, LoadTimeoutError, Outcome, Pool
from rlmodule.core.types import Prompt, RewardResult, Sample
from rlmodule.rewards import REWARDS


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
    """Arguments ``data_source, solution_str, ground_truth, extra_info``."""
    prompt = sample.prompt
    return {
        "data_source": prompt.source,
        "solution_str": sample.text,
        "ground_truth": _verl_truth(prompt),
        "extra_info": dict(prompt.meta),
    }


def _verl_truth(prompt: Prompt) -> Any:
    """The answer; with the type it has in the file where it comes from verl's own column, else as text."""
    own = prompt.meta.get("reward_model")
    truth = own.get("ground_truth") if isinstance(own, Mapping) else None
    is_own = truth is not None and (prompt.answer_value is None or prompt.answer_value == truth)
    return truth if is_own else prompt.answer


def call_trl(sample: Sample) -> dict[str, Any]:
    """Arguments ``prompts, completions, completion_ids`` and every column of the row, each a list of one.

    Prompt and completion are turns where the row has turns, else texts.
    """
    meta = dict(sample.prompt.meta)
    turns = meta.pop("messages", None)
    completion = sample.text if turns is None else [{"role": "assistant", "content": sample.text}]
    return {name: [value] for name, value in meta.items()} | {
        "prompts": [sample.prompt.text if turns is None else turns],
        "completions": [completion],
        "completion_ids": [sample.response_ids.tolist()],
    }


def call_openrlhf(sample: Sample) -> dict[str, Any]:
    """Arguments ``queries`` (prompt and response), ``prompts``, ``labels``, each a list of one."""
    prompt = sample.prompt
    return {"queries": [prompt.text + sample.text], "prompts": [prompt.text], "labels": [prompt.answer]}


@dataclass(frozen=True)
class Convention:
    """How a project calls reward functions.

    Args:
        arguments: makes the keyword arguments of one sample.
        names: arguments that every sample has.
    """

    arguments: Callable[[Sample], dict[str, Any]]
    names: frozenset[str]


CONVENTIONS: dict[str, Convention] = {
    "rlmodule": Convention(
        call_rlmodule, frozenset({"response", "answer", "prompt", "source", "meta", "finish_reason"})
    ),
    "verl": Convention(call_verl, frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})),
    "trl": Convention(call_trl, frozenset({"prompts", "completions", "completion_ids"})),
    "openrlhf": Convention(call_openrlhf, frozenset({"queries", "prompts", "labels"})),
}


@REWARDS.register
@dataclass(frozen=True)
class Function:
    """One call per sample, everything by keyword. A coroutine function is awaited.

    The function returns a number, a mapping with ``score`` (its other numbers are components of the reward, logged as
    ``reward/<key>``) or, as OpenRLHF has it, with ``rewards`` and ``extra_logs``, or a list with one of them. None, NaN
    and infinity mean that the sample cannot be scored, which is no failure.
    """

    path: str  # package.module:function, or path/to/file.py:function
    style: str = "rlmodule"  # whose calling convention: rlmodule, verl, trl, openrlhf
    arguments: dict[str, Any] = field(default_factory=dict)  # more keyword arguments
    components: list[str] = field(default_factory=list)  # numbers of the mapping that advantage=gdpo reads; empty: all
    timeout_seconds: float = 10.0  # for one sample
    import_timeout_seconds: float = 120.0  # to import the function's module
    num_workers: int = 4  # child processes, on each rank that scores
    on_error: str = "unscored"  # what a failure on some samples does: unscored, or raise to stop the run

    knows_one_response: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("style", self.style, CONVENTIONS)
        one_of("on_error", self.on_error, ["unscored", "raise"])
        more_than("timeout_seconds", self.timeout_seconds, 0)
        more_than("import_timeout_seconds", self.import_timeout_seconds, 0)
        at_least("num_workers", self.num_workers, 1)
        for name in sorted(CONVENTIONS[self.style].names & set(self.arguments)):
            raise ConfigError(
                key=f"arguments.{name}",
                got=self.arguments[name],
                because=f"style={self.style} gives the function an argument of this name, taken from the sample",
                fix="Give it another name",
            )
        _check_path(self.path)
        try:
            assert self._pool  # made here, so that a function that cannot be imported is found before a model is loaded
        except LoadTimeoutError as error:
            raise ConfigError(
                key="import_timeout_seconds",
                got=self.import_timeout_seconds,
                because=f"{self.path}: {error}",
                fix="Raise it, or see what the module waits for",
            ) from None
        except LoadError as error:
            raise ConfigError(
                key="path", got=self.path, because="it cannot be imported", fix=f"Its own words:\n{error}"
            ) from None

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order.

        Raises:
            TrainingError: the function failed on a sample while ``on_error`` is ``raise``, or cannot be imported again.
        """
        arguments = CONVENTIONS[self.style].arguments
        try:
            outcomes = self._pool.map([arguments(sample) | self.arguments for sample in samples])
        except LoadError as error:
            raise TrainingError(f"reward.path={self.path} can no longer be imported:\n{error}") from None
        rewards = [self._read(sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]
        failures = [reward.failure for reward in rewards if reward.failure is not None]
        if failures and self.on_error == "raise":
            raise TrainingError(
                f"reward.path={self.path} failed on {len(failures)} of {len(samples)} samples. "
                f"The first is {failures[0]}"
            )
        return rewards

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """Nothing: what a function reads is not known before it is called."""
        return None

    @cached_property
    def _pool(self) -> Pool:
        location, _, name = self.path.rpartition(":")
        if location.endswith(".py"):
            location = str(Path(location).resolve())
        return Pool(f"{location}:{name}", self.num_workers, self.timeout_seconds, self.import_timeout_seconds)

    @property
    def runs_apart(self) -> bool:
        """In child processes; an error that counts failures waits for all samples."""
        return self.on_error != "raise"

    def _read(self, sample: Sample, outcome: Outcome) -> RewardResult:
        """The result of one call; a failure names the sample."""
        value, numbers, fault = None, dict[str, float](), outcome.fault
        if fault is None:
            try:
                value, numbers = _read_result(outcome.result)
            except ValueError as error:
                fault = str(error)
        declared = self.components or list(numbers)
        return RewardResult(
            value,
            parts={name: number for name, number in numbers.items() if name in declared},
            diagnostics={name: number for name, number in numbers.items() if name not in declared},
            counts={"failed": float(fault is not None), "timed_out": float(outcome.timed_out)},
            failure=None if fault is None else f"{_described(sample)}:\n{_printable(fault)}",
        )


def _check_path(path: str) -> None:
    location, _, name = path.rpartition(":")
    if not location or not name:
        raise ConfigError(
            key="path",
            got=path,
            because="it does not say which function of which module",
            fix="Write package.module:function or path/to/file.py:function",
        )
    if location.endswith(".py") and not Path(location).is_file():
        raise ConfigError(key="path", got=path, because=f"no file {Path(location).resolve()}", fix="Correct it")


def _described(sample: Sample) -> str:
    prompt = sample.prompt
    row = prompt.location or f"row {prompt.row + 1} of {prompt.source or 'the data'}"
    return f"sample {sample.sample_id} ({row}, response {sample.text[:80]!r})"


def _read_result(result: Any) -> tuple[float | None, dict[str, float]]:
    if isinstance(result, list) and len(result) == 1:
        return _read_result(result[0])
    if isinstance(result, Mapping) and "rewards" in result and "score" not in result:
        return _read_result(_from_openrlhf(result))
    if isinstance(result, Mapping) and "score" in result:
        value, _ = _read_result(result["score"])
        numbers = {_metric_name(name): float(n) for name, n in result.items() if name != "score" and _is_finite(n)}
        return value, numbers
    if result is None:
        return None, {}
    if isinstance(result, int | float):
        return (float(result) if _is_finite(result) else None), {}
    raise ValueError(f"it returned {result!r:.200}; a number, None or a mapping with 'score' was due")


def _from_openrlhf(result: Mapping[str, Any]) -> dict[str, Any]:
    """``{"rewards", "scores", "extra_logs"}``, each of one sample, with the numbers side by side."""
    logs = result.get("extra_logs")
    numbers = {
        "scores": result.get("scores"),
        **(logs if isinstance(logs, Mapping) else {}),
        "score": result["rewards"],
    }
    return {name: n[0] if isinstance(n, list) and len(n) == 1 else n for name, n in numbers.items() if n is not None}


def _metric_name(name: str) -> str:
    """The key with signs that no log can hold replaced."""
    return "".join(sign if sign.isprintable() else "_" for sign in name) or "unnamed"


def _printable(text: str) -> str:
    return text.encode("utf-8", errors="backslashreplace").decode()


def _is_finite(value: Any) -> bool:
    # The largest float, for whole numbers beyond it have no finite float either.
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
