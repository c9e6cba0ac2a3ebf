"""What tools, environments, users and files say stays text, also where it spells a token that steers a conversation.

A tool that prints the token that ends a turn must not end one. So a mark is put into each such spelling before the chat
template writes it, and the tokenizer is given the pieces on both sides of the mark one by one (``tokens.py``): no piece
spells the token, and those that the template itself writes are whole. Text without such spellings is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlmodule.data.messages import Message
from rlmodule.data.rendering import MARK

CUT = "\u241fcut\u241f"  # a text that no template changes; where data contains it, the text is cut there as well

_WRITTEN_BY_THE_RUN = ("system", "developer", "assistant")  # what they say may hold tokens on purpose
_BY_PEOPLE = ("user",)
_NOTHING = re.compile(r"(?!)")
_SHOWN = 24  # characters


class ControlTokens:
    """Finds spellings of the tokens by which a tokenizer and its chat template steer a conversation.

    Args:
        tokenizer: whose special tokens are meant, and other added tokens that its template writes, such as
            ``<tool_call>``. In what people say only special ones count: a prompt that asks for ``<think>`` means it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added, template = tokenizer.added_tokens_decoder.values(), str(tokenizer.chat_template or "")
        special = {MARK, *tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        written = {token.content for token in added if token.content in template}
        self._special, self._all = _inside_of(special), _inside_of(special | written)

    def cut_in(self, message: Message) -> Message:
        """The message with a mark in each spelling, as far as its role may not write the token itself."""
        return _cut_values(message, self._meant_by(message))

    def first_in(self, message: Message) -> str | None:
        """Where the content of a message would be cut first: a few characters of it, for people."""
        content = message.get("content")
        found = self._meant_by(message).search(content) if isinstance(content, str) else None
        return None if found is None else found.string[found.start() : found.start() + _SHOWN]

    def cut_in_description(self, tool: Message) -> Message:
        """The same for the description of a tool."""
        return _cut_values(tool, self._special)

    def cut_in_observation(self, message: Message) -> Message:
        """The same for what follows a response, whatever its role."""
        return _cut_values(message, self._all)

    def _meant_by(self, message: Message) -> re.Pattern[str]:
        role = message.get("role")
        if role in _WRITTEN_BY_THE_RUN:
            return _NOTHING
        return self._special if role in _BY_PEOPLE else self._all


def _inside_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each spelling, those that overlap included.

    White space is ordinary text, and nothing can be put inside one character.
    """
    words = sorted(token for token in tokens if len(token) > 1 and not token.isspace())
    return re.compile(f"(?={_any_of(words)}).", re.DOTALL) if words else _NOTHING


def _any_of(words: Sequence[str]) -> str:
    """A pattern for what begins with one of the words, common beginnings tried once, for there may be a thousand."""
    tails: dict[str, list[str]] = {}
    for word in words:
        tails.setdefault(word[:1], []).append(word[1:])
    if "" in tails:
        return ""  # a word ends here
    return f"(?:{'|'.join(re.escape(first) + _any_of(rest) for first, rest in tails.items())})"


def _cut_values(mapping: Message, inside: re.Pattern[str]) -> Message:
    return {name: _cut(value, inside) for name, value in mapping.items()}


def _cut(value: Any, inside: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return inside.sub(rf"\g<0>{CUT}", value)
    if isinstance(value, Mapping):
        return _cut_values(value, inside)
    if isinstance(value, list | tuple):
        return _apart([_cut(item, inside) for item in value], inside)
    return value


def _apart(parts: list[Any], inside: re.Pattern[str]) -> list[Any]:
    """The parts of a content, with a mark behind each text where templates that join them would write a spelling."""
    texts = [part["text"] for part in parts if _has_text(part)]
    if inside.search("".join(texts)) is None:
        return parts
    return [{**part, "text": part["text"] + CUT} if _has_text(part) else part for part in parts]


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)
