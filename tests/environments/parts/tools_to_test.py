"""Tools that behave well and badly. Children import this file."""

import asyncio
import os
import time
from enum import Enum
from typing import Literal


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def say(text: str, times: int | None = None) -> str:
    """Say a text.

    Args:
        text: What to say.
        times: How often.
    """
    return text * (times or 1)


def misbehave(how: str) -> list[int]:
    """Fail in some way.

    Args:
        how: The way.
    """
    if how == "raise":
        raise ValueError("no good")
    if how == "hang":
        time.sleep(1000)
    if how == "die":
        os._exit(3)
    if how == "grow":
        return [len(bytearray(1 << 30))]
    if how == "print":
        print("[[[" * 100_000, flush=True)
    if how == "fork":
        os.fork()
    if how == "write":
        raise PermissionError(how)
    if how == "exit":
        raise SystemExit(0)
    if how == "raise lines":
        raise ValueError("first\nsecond")
    if how == "raise again":
        try:
            int("x")
        except ValueError as error:
            raise RuntimeError("in the end") from error
    answers = {"object": object(), "not a number": float("nan"), "half a pair": "\ud83d", "deep": deep()}
    return answers.get(how, [1, 2])


def deep() -> list:
    """A list in a list in a list: as deep as JSON can still write it."""
    made = []
    for _ in range(960):
        made = [made]
    return made


def undescribed(a: int) -> int:
    """No arguments are described."""
    return a


async def later(mode: Literal["add", "none"], xs: list[int]) -> int | None:
    """Add numbers, some time later.

    Args:
        mode: What to do.
        xs: The numbers.
    """
    await asyncio.sleep(0)
    return sum(xs) if mode == "add" else None


class Mode(Enum):
    """What to do."""

    ADD = "add"


def choose(mode: Mode) -> str:
    """Choose.

    Args:
        mode: What to do.
    """
    return mode.name


def collect(*xs: int) -> int:
    """Add numbers.

    Args:
        xs: The numbers.
    """
    return sum(xs)


def by_place(a: int, /) -> int:
    """Give a number.

    Args:
        a: The number.
    """
    return a


def misspelt(a: "intt") -> int:  # noqa: F821
    """Give a number.

    Args:
        a: The number.
    """
    return a


class Shelf:
    """An object with a method."""

    def count(self, a: int) -> int:
        """Give a number.

        Args:
            a: The number.
        """
        return a
