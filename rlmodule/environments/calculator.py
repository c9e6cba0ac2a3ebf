"""Work out ``37 times 48`` with a tool: call it with ``37*48``, then give the number that it returns.

Demonstrations show the form of calls with noise: most calls have the sign of another word, so a policy that imitates
them is wrong at its likeliest, and a few responses answer at once with a number that is near. A small model cannot
multiply, so reinforcement has to find the call with the right sign.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlmodule.core.episodes import Message
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.environments import ENVIRONMENTS
from rlmodule.environments.parts.arithmetic import calc
from rlmodule.environments.parts.procedural import ProceduralEnvironment
from rlmodule.environments.parts.tool_calls import ToolCall
from rlmodule.environments.parts.tool_use import ToolEnvironment
from rlmodule.environments.parts.tools import Tool

SIGNS = {"plus": "+", "minus": "-", "times": "*"}
SMALLEST, LARGEST = 2, 99
NUM_CALLS, NUM_AT_ONCE = 8, 2  # of 10 demonstrations
HABIT = {"plus": "-", "minus": "*", "times": "+"}  # in half of the calls; the right sign in a quarter


@ENVIRONMENTS.register
@dataclass(frozen=True)
class Calculator(ToolEnvironment, ProceduralEnvironment):
    """Two numbers from 2 to 99, added, subtracted or multiplied; reward 1 for the right number, else 0."""

    max_test_size: ClassVar[int] = 4096  # of the 28,812 prompts that exist
    gives_rewards: ClassVar[bool] = True
    has_many_answers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ToolEnvironment.__post_init__(self)
        ProceduralEnvironment.__post_init__(self)

    def tools(self) -> Sequence[Tool]:
        """``calc``."""
        return [Tool.of(calc)]

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Rows of ``train`` or ``test``, with the tool's description."""
        return self.with_tools(super().rows(split))

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """A row with the ``expression`` that its prompt spells out."""
        first, second = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        word = rng.choice(sorted(SIGNS))
        expression = f"{first}{SIGNS[word]}{second}"
        return {
            "prompt": f"{first} {word} {second}",
            "answer": calc(expression),
            "source": "calculator",
            "expression": expression,
        }

    def score(self, row: Prompt, answer: str) -> RewardResult:
        """1 for the number and nothing else."""
        return RewardResult(float(answer.strip() == row.answer))

    def demonstrations(self, count: int, seed: int) -> Sequence[tuple[str, str | Sequence[Message]]]:
        """(prompt, response or turns) pairs; none of the prompts is a test prompt."""
        rows = self._drawn("demonstrations", count, seed)
        return [(row["prompt"], self._shown(row, index)) for index, row in enumerate(rows)]

    def noisy_response(self, row: dict[str, Any], index: int) -> str:
        """The first turn: a call with one of the three signs, or a number that is near."""
        if _calls(index):
            return self._written(_with_sign(row, index))
        return str(int(row["answer"]) + 1 + index % 7)

    def right_response(self, row: dict[str, Any]) -> str:
        """The first turn of an episode that is rewarded."""
        return self._written(row["expression"])

    def _shown(self, row: dict[str, Any], index: int) -> str | Sequence[Message]:
        """A demonstration: the number that the tool returns is passed on."""
        first = self.noisy_response(row, index)
        if not _calls(index):
            return first
        result = calc(_with_sign(row, index))
        return [
            {"role": "assistant", "content": first},
            {"role": self.observation_role, "content": result},
            {"role": "assistant", "content": result},
        ]

    def _written(self, expression: str) -> str:
        return self.format.written(ToolCall("calc", {"x": expression}))


def _calls(index: int) -> bool:
    """Whether demonstration ``index`` calls the tool."""
    return index % (NUM_CALLS + NUM_AT_ONCE) < NUM_CALLS


def _with_sign(row: dict[str, Any], index: int) -> str:
    """The expression with the sign that demonstration ``index`` shows."""
    first, word, second = row["prompt"].split()
    right, habit = SIGNS[word], HABIT[word]
    [other] = set(SIGNS.values()) - {right, habit}
    block = index // (NUM_CALLS + NUM_AT_ONCE)
    return f"{first}{(right, habit, other, habit)[block % 4]}{second}"
