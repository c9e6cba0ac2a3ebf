"""Tools that behave well and badly. Children import this file."""

import os
import time


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
    return [1, 2]


def undescribed(a: int) -> int:
    """No arguments are described."""
    return a
