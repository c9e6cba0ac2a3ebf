"""Reach a target with three numbers, + and -: ``3 7 2 -> 8`` is answered by ``3+7-2`` and others.

The reward ``countdown`` takes every right expression; there is no label to compare with.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from rlmodule.environments import ENVIRONMENTS
from rlmodule.environments.parts.procedural import ProceduralEnvironment

NUM_NUMBERS = 3


@ENVIRONMENTS.register
@dataclass(frozen=True)
class Countdown(ProceduralEnvironment):
    """Three numbers from 1 to 9 in any order, each used once; targets from 0 to 99 that can be reached."""

    has_many_answers: ClassVar[bool] = True
    max_test_size: ClassVar[int] = 512  # of the 2,700 prompts that exist

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """A row with ``numbers`` as shown, the target as ``answer`` and one ``solution`` of several."""
        target = -1
        while not 0 <= target <= 99:
            terms = [rng.randint(1, 9)] + [rng.choice((1, -1)) * rng.randint(1, 9) for _ in range(NUM_NUMBERS - 1)]
            target = sum(terms)
        numbers = [abs(term) for term in terms]
        rng.shuffle(numbers)
        return {
            "prompt": f"{' '.join(map(str, numbers))} -> {target}",
            "answer": str(target),
            "source": "countdown",
            "numbers": numbers,
            "solution": f"{terms[0]}" + "".join(f"{term:+d}" for term in terms[1:]),
        }

    def noisy_response(self, row: dict[str, Any], index: int) -> str:
        """One valid expression."""
        return str(row["solution"])

    def right_response(self, row: dict[str, Any]) -> str:
        """One valid expression of several."""
        return str(row["solution"])

    def wrong_response(self, row: dict[str, Any], index: int) -> str:
        """The same expression with one of its signs turned, which always misses the target: no number is 0."""
        solution = str(row["solution"])
        at = (1, 3)[index % 2]  # numbers have one digit, so signs stand second and fourth
        return solution[:at] + {"+": "-", "-": "+"}[solution[at]] + solution[at + 1 :]
