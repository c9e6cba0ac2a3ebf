"""Put digits in ascending order: ``sort 31402`` -> ``01234``. The default environment; its reward is ``exact_match``.

Demonstrations show three habits in equal parts, of which the reward calls for the first: reinforcement then has
something to choose from.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from rlmodule.environments import ENVIRONMENTS
from rlmodule.environments.parts.procedural import ProceduralEnvironment

MIN_DIGITS, MAX_DIGITS = 3, 6


@ENVIRONMENTS.register
@dataclass(frozen=True)
class Sort(ProceduralEnvironment):
    """Sort 3 to 6 digits."""

    max_test_size: ClassVar[int] = 1024  # takes 256 of the 1,000 prompts of three digits

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """A row whose answer is its digits in ascending order."""
        digits = "".join(rng.choices("0123456789", k=rng.randint(MIN_DIGITS, MAX_DIGITS)))
        return {"prompt": f"sort {digits}", "answer": "".join(sorted(digits)), "source": "sort"}

    def noisy_response(self, row: dict[str, Any], index: int) -> str:
        """Ascending, descending or unchanged, a third each."""
        digits = row["prompt"].removeprefix("sort ")
        return str((row["answer"], row["answer"][::-1], digits)[index % 3])
