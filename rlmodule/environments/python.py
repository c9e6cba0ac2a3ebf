"""Questions that a short program answers, and a tool that runs Python: for models that can write programs.

Questions are about whole numbers, with one right answer. Programs run in the sandbox of ``reward=code``.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlmodule.core.config import at_least
from rlmodule.core.sandbox.pool import child_file
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.environments import ENVIRONMENTS
from rlmodule.environments.parts.procedural import ProceduralEnvironment
from rlmodule.environments.parts.tool_calls import ToolCall
from rlmodule.environments.parts.tool_use import ToolEnvironment
from rlmodule.environments.parts.tools import Tool

START_MARGIN = 30.0  # seconds beside those of a program: to find out what can be isolated, to clean up
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program. Only what it prints is shown.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


@ENVIRONMENTS.register
@dataclass(frozen=True)
class Python(ToolEnvironment, ProceduralEnvironment):
    """Powers, primes and remainders; reward 1 where the last number of the answer is right."""

    max_processes: int = 16  # processes and threads of a program at a time, where they can be counted
    output_mb: int = 1  # size of one file, and of what is printed, MiB

    max_test_size: ClassVar[int] = 1024  # of some 80,000 prompts
    gives_rewards: ClassVar[bool] = True
    has_many_answers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ToolEnvironment.__post_init__(self)
        ProceduralEnvironment.__post_init__(self)
        at_least("max_processes", self.max_processes, 1)
        at_least("output_mb", self.output_mb, 1)

    def tools(self) -> Sequence[Tool]:
        """``python``, each call a process of its own inside a child that finds out what can be held apart."""
        limits = {
            "seconds": self.tool_seconds,
            "memory": self.tool_memory_mb << 20,
            "processes": self.max_processes,
            "file_bytes": self.output_mb << 20,
        }
        runner = child_file("rlmodule.environments.parts.python_program")
        return [Tool(_SCHEMA, f"{runner}:python", {"limits": limits}, seconds=self.tool_seconds + START_MARGIN)]

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Rows of ``train`` or ``test``, with the tool's description."""
        return self.with_tools(super().rows(split))

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """A question about whole numbers and its ``code``, which prints the answer."""
        base, power, other = rng.randint(2, 99), rng.randint(20, 99), rng.randint(100, 9999)
        is_prime = "all(n % k for k in range(2, int(n**.5) + 1))"
        question, answer, code = rng.choice(
            [
                (
                    f"What is the sum of the digits of {base}^{power}?",
                    sum(map(int, str(base**power))),
                    f"print(sum(map(int, str({base}**{power}))))",
                ),
                (
                    f"What is the remainder of {base}^{power} divided by {other}?",
                    pow(base, power, other),
                    f"print({base}**{power} % {other})",
                ),
                (
                    f"What is the greatest prime number below {other}?",
                    next(n for n in range(other - 1, 1, -1) if all(n % k for k in range(2, math.isqrt(n) + 1))),
                    f"print(next(n for n in range({other} - 1, 1, -1) if {is_prime}))",
                ),
            ]
        )
        return {"prompt": question, "answer": str(answer), "source": "python", "code": code}

    def score(self, row: Prompt, answer: str) -> RewardResult:
        """1 where the last number of the answer is the right one."""
        last = (_NUMBER.findall(answer) or [""])[-1].replace(",", "")
        whole, _, part = last.partition(".")
        return RewardResult(float(whole == row.answer and not part.strip("0")))

    def noisy_response(self, row: dict[str, Any], index: int) -> str:
        """The first turn: the program that prints the answer."""
        return self.right_response(row)

    def right_response(self, row: dict[str, Any]) -> str:
        """The call that is due."""
        return self.format.written(ToolCall("python", {"code": row["code"]}))
