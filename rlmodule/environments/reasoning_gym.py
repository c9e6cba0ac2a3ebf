"""Tasks of Reasoning Gym (github.com/open-thought/reasoning-gym), made when a run begins; one response each.

Its reward is ``reasoning_gym``, which asks the scorer of the task. Leaves out rows in files, which need no environment.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.core.types import Prompt
from rlmodule.environments import ENVIRONMENTS
from rlmodule.environments.parts.single_turn import SingleTurnEpisode

TEST_SEED = 1 << 30  # added to the seed for held-out rows


@ENVIRONMENTS.register
@dataclass(frozen=True)
class ReasoningGym:
    """One task by name, with its own settings; rows are drawn from a seed."""

    task: str = "basic_arithmetic"  # a name of the gym; an unknown one is answered with the list
    settings: dict[str, Any] = field(default_factory=dict)  # of the task, such as {min_digits: 2}
    instruction: str = "Put your answer between <answer> and </answer>."  # behind each question; empty for none
    train_size: int = 8192  # rows
    test_size: int = 256  # held-out rows, with questions that no training row has
    seed: int = 0  # of the rows

    has_many_answers: ClassVar[bool] = True
    gives_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least("train_size", self.train_size, 1)
        at_least("test_size", self.test_size, 1)
        at_least("seed", self.seed, 0)
        if importlib.util.find_spec("reasoning_gym") is None:
            raise DependencyError(package="reasoning-gym", needed_by="environment=reasoning_gym", extra="reasoning_gym")

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Rows of ``train`` or ``test``; a training row whose question is held out is left out.

        Raises:
            ConfigError: there is no such task, or its settings are wrong.
        """
        assert split in ("train", "test"), f"no split is called {split}"
        held_out = self._made(self.test_size, self.seed + TEST_SEED)
        if split == "test":
            return held_out
        questions = {row["prompt"] for row in held_out}
        return [row for row in self._made(self.train_size, self.seed) if row["prompt"] not in questions]

    def start(self, row: Prompt) -> SingleTurnEpisode:
        """An episode of one response."""
        return SingleTurnEpisode(row)

    def _made(self, size: int, seed: int) -> list[dict[str, Any]]:
        import reasoning_gym

        try:
            entries = list(reasoning_gym.create_dataset(self.task, size=size, seed=seed, **self.settings))
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                key="environment.task",
                got=self.task,
                because=f"Reasoning Gym cannot make it: {error}",
                fix="Use the name of one of its data sets, and settings that it has",
            ) from None
        return [
            {
                "prompt": f"{entry['question']}\n{self.instruction}".strip(),
                "answer": str(entry["answer"]),
                "source": self.task,
                "metadata": {"source_dataset": self.task, **entry["metadata"]},
            }
            for entry in entries
        ]
