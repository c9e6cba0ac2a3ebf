"""A failure of one process reaches all of them, so that none waits for an exchange that will not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from rlmodule.core.errors import CheckpointError, in_one_line

T = TypeVar("T")


def first_error(problem: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """The first problem that any process of the group has, on every process of it; one exchange."""
    return first_told(None if problem is None else f"rank {_rank(group)}: {problem}", group)


def on_all_or_none(stage: Callable[[], T]) -> T:
    """Run ``stage``, which must not exchange anything, on every process; one exchange follows.

    Raises:
        CheckpointError: on every process, when the stage failed on any.
    """
    outcome: list[T] = []
    failure: str | None = None
    cause: Exception | None = None
    try:
        outcome.append(stage())
    except CheckpointError as error:
        failure, cause = str(error), error
    except Exception as error:
        failure, cause = f"rank {_rank(None)}: {in_one_line(error)}", error
    first = first_told(failure, None)
    if first is not None:
        raise CheckpointError(first) from cause
    return outcome[0]


def first_told(text: str | None, group: dist.ProcessGroup | None) -> str | None:
    """The first text that any process of the group has, as it is, on every process of it; one exchange."""
    if not dist.is_initialized():
        return text
    everyone: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, text, group=group)
    return next((told for told in everyone if told is not None), None)


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0
