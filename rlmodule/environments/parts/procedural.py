"""Tasks that draw their prompts at random, from a seed of their own. Leaves out scoring (``rewards/``)."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError


@dataclass(frozen=True)
class ProceduralTask(ABC):
    """A task that draws its prompts at random. A subclass says how to draw one row and how a beginner answers it."""

    train_size: int = 8192  # rows; a prompt can turn up twice
    test_size: int = 256  # rows, all different, and none of them a training or demonstration prompt
    seed: int = 0  # of the data; independent of the seed of the run

    has_many_answers: ClassVar[bool] = False
    max_test_size: ClassVar[int]  # a larger test set would leave the shortest prompts no room in training

    def __post_init__(self) -> None:
        at_least("train_size", self.train_size, 1)
        at_least("test_size", self.test_size, 1)
        if self.test_size > self.max_test_size:
            raise ConfigError(
                key="test_size",
                got=self.test_size,
                because=f"this task has few short prompts, and keeps {self.max_test_size} rows apart at most",
                fix=f"Use test_size={self.max_test_size} or less",
            )

    @abstractmethod
    def draw(self, rng: random.Random) -> dict[str, Any]:
        """One random row with ``prompt``, ``answer`` and whatever else the reward needs."""

    @abstractmethod
    def noisy_response(self, row: dict[str, Any], index: int) -> str:
        """How a beginner answers ``row``; ``index`` numbers the demonstrations."""

    def right_response(self, row: dict[str, Any]) -> str:
        """A response that earns the reward; the answer itself, unless a task says otherwise."""
        return str(row["answer"])

    def wrong_response(self, row: dict[str, Any], index: int) -> str:
        """What a beginner says where that is wrong, else the right response with one character missing."""
        said, right = self.noisy_response(row, index), self.right_response(row)
        at = index % len(right)
        return said if said != right else right[:at] + right[at + 1 :]

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Rows of ``train`` or ``test``; the two never share a prompt."""
        assert split in ("train", "test"), f"no split is called {split}"
        held_out = self._held_out()
        if split == "test":
            return list(held_out.values())
        return list(islice(self._draw_endlessly(f"train/{self.seed}", held_out), self.train_size))

    def demonstrations(self, count: int, seed: int) -> list[tuple[str, str]]:
        """(prompt, response) pairs for a warm start; none of the prompts is a test prompt."""
        shown = self._drawn("demonstrations", count, seed)
        return [(row["prompt"], self.noisy_response(row, index)) for index, row in enumerate(shown)]

    def preferences(self, count: int, seed: int) -> list[tuple[str, str, str]]:
        """(prompt, right response, wrong response) triples; none of the prompts is a test prompt."""
        return self._right_and_wrong(self._drawn("preferences", count, seed))

    def held_out_preferences(self) -> list[tuple[str, str, str]]:
        """The same of the test prompts, one of each."""
        return self._right_and_wrong(self.rows("test"))

    def _right_and_wrong(self, rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
        return [
            (row["prompt"], self.right_response(row), self.wrong_response(row, index)) for index, row in enumerate(rows)
        ]

    def _drawn(self, what: str, count: int, seed: int) -> list[dict[str, Any]]:
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
