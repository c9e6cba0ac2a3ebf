"""Scorers of Reasoning Gym. Runs in a child process of a pool, which imports this file by its path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.factory import DATASETS


def score(name: str, answer: str = "", entry: Mapping[str, Any] | None = None) -> float | list[str]:
    """The score of an answer to ``entry``, 0 to 1; without an entry the names of all tasks."""
    if entry is None:
        return sorted(DATASETS)
    value = float(_scorer(name)(answer=answer, entry=dict(entry)))
    return min(max(value, 0.0), 1.0) if value == value else 0.0


@functools.cache
def _scorer(name: str) -> Callable[..., float]:
    scorer: Callable[..., float] = get_score_answer_fn(name)
    return scorer
