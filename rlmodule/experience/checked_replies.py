"""What environments give is checked where it comes in: they are code of others, and a wrong value costs its episode.

Numbers of other libraries become floats. Leaves out what the chat template makes of messages (``data/chat.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any

from rlmodule.core.episodes import Done, Message, Observation
from rlmodule.core.types import RewardResult
from rlmodule.data.json_text import is_unicode


class WrongReplyError(Exception):
    """What an environment gave cannot be used; the text says why."""


def checked_observation(shown: Observation, vocab_size: int) -> Observation:
    """An observation with token ids of the vocabulary, or messages that a chat template can read.

    Raises:
        WrongReplyError: it has neither.
    """
    reward = None if shown.reward is None else _finite(shown.reward, "the reward of a turn")
    if shown.ids is None:
        return replace(shown, messages=_messages(shown.messages), reward=reward)
    try:
        ids = tuple(map(index, shown.ids))
    except TypeError as error:
        raise WrongReplyError(f"ids of an observation are whole numbers: {error}") from None
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None or not ids:
        found = "is empty" if wrong is None else f"has token {wrong}, and there are 0 to {vocab_size - 1}"
        raise WrongReplyError(f"an observation {found}")
    return replace(shown, ids=ids, reward=reward)


def checked_end(end: Any) -> Done:
    """The end of an episode, with numbers for what are numbers.

    Raises:
        WrongReplyError: it is none, or a reward is no finite number.
    """
    if not isinstance(end, Done):
        raise WrongReplyError(f"{end!r:.200} is no Done")
    reward, diagnostics = end.reward, _numbers(end.diagnostics, "diagnostics of Done")
    if reward is None:
        return replace(end, diagnostics=diagnostics)
    if not isinstance(reward, RewardResult):
        raise WrongReplyError(f"the reward of Done is a RewardResult or None, got {reward!r:.200}")
    checked = replace(
        reward,
        value=None if reward.value is None else _finite(reward.value, "the reward"),
        parts=_numbers(reward.parts, "parts of a reward"),
        diagnostics=_numbers(reward.diagnostics, "diagnostics of a reward"),
        counts=_numbers(reward.counts, "counts of a reward"),
    )
    return Done(checked, diagnostics)


def _messages(given: Any) -> Sequence[Message]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise WrongReplyError(f"messages of an observation are a list with at least one, got {given!r:.200}")
    for message in given:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise WrongReplyError(f"a message has a role and content, got {message!r:.200}")
        content = message.get("content")
        if not isinstance(content, str) and not (
            isinstance(content, list | tuple) and all(map(_is_text_part, content))
        ):
            raise WrongReplyError(f"the content of a message is text, got {content!r:.200}")
        if not is_unicode(dict(message)):
            raise WrongReplyError(f"a message holds half of a surrogate pair: {message!r:.200}")
    return given


def _is_text_part(part: Any) -> bool:
    """Whether this is a part of a content that a model of texts reads; of an image a template writes a mark alone."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _numbers(given: Any, what: str) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise WrongReplyError(f"{what} are numbers by name, got {given!r:.200}")
    return {str(name): _number(value, f"{what}, {name},") for name, value in given.items()}


def _finite(given: Any, what: str) -> float:
    value = _number(given, what)
    if not math.isfinite(value):
        raise WrongReplyError(f"{what} is {value}")
    return value


def _number(given: Any, what: str) -> float:
    try:
        return float("text" if isinstance(given, str | bytes) else given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last by a tensor of several
        raise WrongReplyError(f"{what} is no number: {given!r:.200}") from None
