"""1 for a response whose program passes every test of its row, else 0.

The program runs in a process of its own with limits on time, memory and output, in an empty folder and environment, and
where the machine allows it without network, other files and many processes: ``core/sandbox/isolation.py`` says what is
held apart and what is not. The last block of Python counts. Leaves out other languages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rlmodule.core.config import at_least, more_than
from rlmodule.core.errors import ConfigError
from rlmodule.core.sandbox.pool import Outcome, Pool, child_file
from rlmodule.core.types import Prompt, RewardResult, Sample
from rlmodule.rewards import REWARDS
from rlmodule.rewards.parts.code_tests import Test, code_of, read_tests

START_MARGIN = 30.0  # seconds beside those of the tests: to find out what can be isolated, to clean up


@REWARDS.register
@dataclass(frozen=True)
class Code:
    """Needs rows with tests: asserts, or inputs with the outputs that are due.

    Diagnostics: ``passed_tests``, the share of tests passed (without ``partial`` only up to the first that fails);
    ``has_code``. A program that runs out of time counts in ``reward/timed_out``.
    """

    tests_key: str = ""  # column with the tests; empty for the answer of the row
    entry_key: str = "entry_point"  # column with the function's name, for tests that are one check(candidate)
    fenced_only: bool = False  # a response without a block of code has none; false: all of it is taken for code
    partial: bool = False  # score the share of tests passed
    test_seconds: float = 5.0  # for one test, or for all asserts together
    timeout_seconds: float = 30.0  # for all tests of a response
    memory_mb: int = 1024  # address space of a process, MiB
    max_processes: int = 16  # processes and threads of a program at a time, where they can be counted
    output_mb: int = 16  # size of one file, and of what is printed, MiB
    require_no_network: bool = False  # refuse to start where programs cannot be kept from the network
    num_workers: int = 4  # programs at a time, on each rank that scores
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        more_than("test_seconds", self.test_seconds, 0)
        at_least("timeout_seconds", self.timeout_seconds, self.test_seconds)
        at_least("memory_mb", self.memory_mb, 64)
        for name in ("max_processes", "output_mb", "num_workers"):
            at_least(name, getattr(self, name), 1)
        if self.require_no_network and not self.isolated["network"]:
            raise ConfigError(
                key="require_no_network",
                got=True,
                because="this machine does not let programs be kept from the network (no user namespaces)",
                fix="Allow them, run in a container without network, or set require_no_network=false",
            )

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        programs = [
            None if sample.finish_reason == "length" else code_of(sample.text, fenced_only=self.fenced_only)
            for sample in samples
        ]
        tests = [self._tests(sample.prompt) for sample in samples]
        runs = [i for i, program in enumerate(programs) if program is not None]
        calls = [{"code": programs[i], "tests": tests[i], **self._limits, "stops": not self.partial} for i in runs]
        outcomes = dict(zip(runs, self._pool.map(calls) if calls else [], strict=True))
        return [
            self._result(len(tests[i]), outcomes.get(i), is_cut=sample.finish_reason == "length")
            for i, sample in enumerate(samples)
        ]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row lacks: tests."""
        value = columns.get(self.tests_key) if self.tests_key else answer
        if value is None:
            where = f"column '{self.tests_key}'" if self.tests_key else "answer"
            return f"it has no {where}, in which reward=code looks for tests (reward.tests_key)"
        try:
            read_tests(value, columns.get(self.entry_key))
        except (ValueError, TypeError, AttributeError) as error:
            return f"reward=code cannot read its tests: {error}"
        return None

    @cached_property
    def isolated(self) -> dict[str, bool]:
        """What this machine lets be held apart: ``network``, ``processes``, ``user``."""
        [outcome] = Pool(f"{child_file('rlmodule.rewards.parts.code_runner')}:isolated", 1, START_MARGIN * 4).map(
            [{"limits": self._limits["limits"]}]
        )
        assert outcome.fault is None, outcome.fault
        return dict(outcome.result)

    @property
    def _limits(self) -> dict[str, Any]:
        limits = {
            "seconds": self.test_seconds,
            "memory": self.memory_mb << 20,
            "processes": self.max_processes,
            "file_bytes": self.output_mb << 20,
        }
        return {"limits": limits, "seconds": self.timeout_seconds}

    def _tests(self, prompt: Prompt) -> list[Test]:
        answer = prompt.answer if prompt.answer_value is None else prompt.answer_value
        return read_tests(prompt.meta[self.tests_key] if self.tests_key else answer, prompt.meta.get(self.entry_key))

    def _result(self, num_tests: int, outcome: Outcome | None, *, is_cut: bool) -> RewardResult:
        """Of one response; without an outcome no program ran."""
        if is_cut:
            return RewardResult(self.truncated)
        if outcome is None:
            return RewardResult(0.0, diagnostics={"passed_tests": 0.0, "has_code": 0.0}, counts={"timed_out": 0.0})
        if outcome.fault is not None:
            return RewardResult(None, counts={"failed": 1.0}, failure=f"its program could not be run: {outcome.fault}")
        share = outcome.result["passed"] / num_tests
        return RewardResult(
            share if self.partial else float(share == 1),
            diagnostics={"passed_tests": share, "has_code": 1.0},
            counts={"timed_out": float(outcome.result["timed_out"])},
        )

    @cached_property
    def _pool(self) -> Pool:
        return Pool(
            f"{child_file('rlmodule.rewards.parts.code_runner')}:run_tests",
            self.num_workers,
            self.timeout_seconds + START_MARGIN,
        )
