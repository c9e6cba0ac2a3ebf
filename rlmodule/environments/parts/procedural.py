"""Environments of one turn that draw their rows at random, from a seed of their own.

Leaves out scoring (``rewards/``).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from rlmodule.core.config import at_least
from rlmodule.core.contract import Episode
from rlmodule.core.episodes import Message
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import Prompt
from rlmodule.environments.parts.single_turn import SingleTurnEpisode


@dataclass(frozen=True)
class ProceduralEnvironment(ABC):
    """Random rows, one response each. A subclass says how to draw a row and how an untrained policy should answer it.

    Besides rows there are demonstrations, so that a model with random weights can be warm-started, and preferences.
    """

    train_size: int = 8192  # rows; a prompt can turn up twice
    test_size: int = 256  # rows, all different, and none of them a training or demonstration prompt
    seed: int = 0  # of the data; independent of the seed of the run

    has_many_answers: ClassVar[bool] = False
    gives_rewards: ClassVar[bool] = False
    max_test_size: ClassVar[int]  # a larger test set would hold out so many short prompts that few are left to train on

    def __post_init__(self) -> None:
        at_least("train_size", self.train_size, 1)
        at_least("test_size", self.test_size, 1)
        if self.test_size > self.max_test_size:
            raise ConfigError(
                key="test_size",
                got=self.test_size,
                because=f"this environment has few short prompts, and holds out {self.max_test_size} rows at most",
                fix=f"Use test_size={self.max_test_size} or less",
            )

    @abstractmethod
    def draw(self, rng: random.Random) -> dict[str, Any]:
        """One random row with ``prompt``, ``answer``, ``source`` and every other column that the reward needs."""

    @abstractmethod
    def noisy_response(self, row: dict[str, Any], index: int) -> str:
        """Response to ``row`` in a demonstration, right or wrong; ``index`` numbers the demonstrations."""

    def right_response(self, row: dict[str, Any]) -> str:
        """A response that earns the reward; the answer itself unless a subclass overrides this."""
        return str(row["answer"])

    def wrong_response(self, row: dict[str, Any], index: int) -> str:
        """The noisy response where it is wrong, else the right one with one character missing."""
        noisy, right = self.noisy_response(row, index), self.right_response(row)
        at = index % len(right)
        return noisy if noisy != right else right[:at] + right[at + 1 :]

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Rows of ``train`` or ``test``; the two never share a prompt."""
        assert split in ("train", "test"), f"no split is called {split}"
        held_out = self._held_out()
        if split == "test":
            return list(held_out.values())
        return list(islice(self._draw_endlessly(f"train/{self.seed}", held_out), self.train_size))

    def start(self, row: Prompt) -> Episode:
        """An episode of one response."""
        return SingleTurnEpisode(row)

    def demonstrations(self, count: int, seed: int) -> Sequence[tuple[str, str | Sequence[Message]]]:
        """(prompt, noisy response) pairs for a warm start; none of the prompts is a test prompt."""
        rows = self._drawn("demonstrations", count, seed)
        return [(row["prompt"], self.noisy_response(row, index)) for index, row in enumerate(rows)]

    def preferences(self, count: int, seed: int) -> list[tuple[str, str, str]]:
        """(prompt, right response, wrong response) triples; none of the prompts is a test prompt."""
        return self._right_and_wrong(self._drawn("preferences", count, seed))

    def held_out_preferences(self) -> list[tuple[str, str, str]]:
        """(prompt, right response, wrong response) of each test prompt."""
        return self._right_and_wrong(self.rows("test"))

    def _right_and_wrong(self, rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
        return [
            (row["prompt"], self.right_response(row), self.wrong_response(row, index)) for index, row in enumerate(rows)
        ]

    def _drawn(self, what: str, count: int, seed: int) -> list[dict[str, Any]]:
        """The first ``count`` rows of a stream of its own, without test prompts."""
        return list(islice(self._draw_endlessly(f"{what}/{self.seed}/{seed}", self._held_out()), count))

    def _held_out(self) -> dict[str, dict[str, Any]]:
        held_out: dict[str, dict[str, Any]] = {}
        rows = self._draw_endlessly(f"test/{self.seed}", held_out)
        while len(held_out) < self.test_size:
            row = next(rows)
            held_out[row["prompt"]] = row
        return held_out

    def _draw_endlessly(self, stream: str, without: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
        # Python fixes random.Random(text) across versions and machines, and streams of different names are unrelated.
        rng = random.Random(f"{type(self).__name__}/{stream}")
        while True:
            row = self.draw(rng)
            if row["prompt"] not in without:
                yield row
