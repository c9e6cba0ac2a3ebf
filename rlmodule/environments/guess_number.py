"""Find a number within a few guesses: ``guess 23-29`` is answered by ``26``, which ``higher`` or ``lower`` answers.

The best way is to halve what is left: three guesses always find one of 7 numbers, and no other way does. Demonstrations
guess any number that is still possible, which finds it in two cases of three; reinforcement has to find the middle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

from rlmodule.core.config import at_least
from rlmodule.core.episodes import LENGTH, Completion, Done, Message, Observation
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.environments import ENVIRONMENTS

LOWEST, HIGHEST = 10, 99  # numbers of two digits
HIGHER, LOWER = "higher", "lower"
OBSERVATION_ROLE = "user"


@ENVIRONMENTS.register
@dataclass(frozen=True)
class GuessNumber:
    """Ranges of ``size`` numbers; a fifth of the ranges is held out. Reward 1 for finding the number, else 0."""

    train_size: int = 8192  # rows; a range and a number can turn up twice
    test_size: int = 256  # rows with ranges that no training row has
    seed: int = 0  # of the rows; independent of the seed of the run
    size: int = 7  # numbers in a range
    guesses: int = 3  # after which the number is not found
    miss_reward: float = 0.0  # of each guess that misses; such as -0.1, so that fewer guesses are better
    question: str = "guess {low}-{high}"  # the prompt

    has_many_answers: ClassVar[bool] = True
    gives_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("train_size", 1), ("test_size", 1), ("size", 2), ("guesses", 1)):
            at_least(name, getattr(self, name), least)
        if len(self._ranges) < 5:
            raise ConfigError(
                key="size",
                got=self.size,
                because=f"there are {max(0, len(self._ranges))} ranges of so many numbers of two digits, too few to "
                "hold some out",
                fix=f"Use size={HIGHEST - LOWEST - 3} or less",
            )
        if "{low}" not in self.question or "{high}" not in self.question:
            raise ConfigError(
                key="question",
                got=self.question,
                because="it does not say the range",
                fix="Write {low} and {high} where its ends stand",
            )

    @property
    def observation_role(self) -> str:
        """Hints are the user's."""
        return OBSERVATION_ROLE

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Rows of ``train`` or ``test``; the two share no range."""
        assert split in ("train", "test"), f"no split is called {split}"
        return list(islice(self._draw(split, self.seed), self.train_size if split == "train" else self.test_size))

    def start(self, row: Prompt) -> Guessing:
        """A new game about the number of ``row``."""
        return Guessing(row, int(row.meta["low"]), int(row.meta["high"]), self.guesses, self.miss_reward)

    def demonstrations(self, count: int, seed: int) -> list[tuple[str, Sequence[Message]]]:
        """(prompt, turns) pairs with guesses at random among the numbers that are still possible."""
        rng = random.Random(f"GuessNumber/guesses/{self.seed}/{seed}")
        return [(row["prompt"], self._played(row, rng)) for row in islice(self._draw("shown", seed), count)]

    def preferences(self, count: int, seed: int) -> list[tuple[str, str, str]]:
        """(prompt, middle, an end of the range): the best first guess and one of the worst."""
        rows = islice(self._draw("preferred", seed), count)
        return [_first_guesses(row, index) for index, row in enumerate(rows)]

    def held_out_preferences(self) -> list[tuple[str, str, str]]:
        """The same of each test row."""
        return [_first_guesses(row, index) for index, row in enumerate(self.rows("test"))]

    @property
    def _ranges(self) -> range:
        """First number of every range."""
        return range(LOWEST, HIGHEST - self.size + 2)

    def _draw(self, stream: str, seed: int) -> Iterator[dict[str, Any]]:
        """Rows of a stream without end: those of ``test`` have the ranges that are held out, all others the rest."""
        mixed = list(self._ranges)
        random.Random(f"GuessNumber/ranges/{self.seed}").shuffle(mixed)
        held_out = -(-len(mixed) // 5)
        ranges = mixed[:held_out] if stream == "test" else mixed[held_out:]
        rng = random.Random(f"GuessNumber/{stream}/{self.seed}/{seed}")
        while True:
            low = rng.choice(ranges)
            high = low + self.size - 1
            yield {
                "prompt": self.question.format(low=low, high=high),
                "answer": str(rng.randint(low, high)),
                "source": "guess_number",
                "low": low,
                "high": high,
            }

    def _played(self, row: dict[str, Any], rng: random.Random) -> list[Message]:
        """A game in which no guess contradicts a hint."""
        low, high, number = row["low"], row["high"], int(row["answer"])
        turns: list[Message] = []
        for guess_number in range(self.guesses):
            guess = rng.randint(low, high)
            turns.append({"role": "assistant", "content": str(guess)})
            if guess == number or guess_number == self.guesses - 1:
                break
            turns.append({"role": OBSERVATION_ROLE, "content": HIGHER if guess < number else LOWER})
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        return turns


def _first_guesses(row: dict[str, Any], index: int) -> tuple[str, str, str]:
    low, high = int(row["low"]), int(row["high"])
    return row["prompt"], str((low + high) // 2), str((low, high)[index % 2])


@dataclass(eq=False)
class Guessing:
    """One game.

    Args:
        row: whose answer is the number.
        low, high: ends of the range.
        guesses: left.
        miss_reward: of each guess that misses.
    """

    row: Prompt
    low: int
    high: int
    guesses: int
    miss_reward: float
    num_guesses: int = field(default=0, init=False)

    @property
    def prompt(self) -> Observation:
        """The row's own prompt."""
        return Observation(ids=self.row.ids)

    def reply(self, completion: Completion) -> Observation | Done:
        """A hint; the end once the number is found or no guess is left."""
        self.num_guesses += 1
        text = completion.text.strip()
        is_number = text.isascii() and text.isdigit() and len(text) <= 9 and completion.finish_reason != LENGTH
        if is_number and int(text) == int(str(self.row.answer)):
            return Done(RewardResult(1.0))
        if self.num_guesses == self.guesses:
            return Done(RewardResult(self.miss_reward))
        if not is_number or not self.low <= int(text) <= self.high:
            return self._said(f"a number from {self.low} to {self.high}")
        return self._said(HIGHER if int(text) < int(str(self.row.answer)) else LOWER)

    def cut(self) -> Done:
        """The number was not found."""
        return Done(RewardResult(0.0))

    def _said(self, words: str) -> Observation:
        reward = self.miss_reward or None
        return Observation(messages=[{"role": OBSERVATION_ROLE, "content": words}], reward=reward)
