"""The text of a conversation as its chat template writes it, and where in that text each assistant turn stands.

A template may write a turn differently by its place: another end token after the last turn, reasoning dropped once a
question follows, an empty thinking block in the last turn alone. So no turn is rendered by itself. The whole
conversation is, and turns are found in it by comparing it with renderings of its beginning, and with renderings that
have a mark in the place of one turn's content. Leaves out tokens (``tokens.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlmodule.data.messages import ChatError, Message, is_assistant

MARK = "\u241eend of content\u241e"  # a text that no template changes and no data contains

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TAG = re.compile(r"<[^<>]*>")
_OPENED_TAG = re.compile(r"(<[^<>]+>)(\s*)$")  # what a generation prompt ends with, such as "<think>\n"
_TAGS_AT_END = re.compile(r"(?:<[^<>]+>\s*)+$")


class Render(Protocol):
    """Writes messages as text."""

    def __call__(self, messages: Sequence[Message], asks_for_answer: bool = False) -> str:
        """``asks_for_answer`` adds the generation prompt: what makes a model answer as the assistant."""


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``end`` of a text: one assistant turn, the token that ends it included."""

    start: int
    end: int


@dataclass(frozen=True)
class Rendering:
    """A conversation as text, and the assistant turns in it that are trained, in order."""

    text: str
    trained: tuple[Span, ...]


def render_conversation(
    render: Render, messages: Sequence[Message], num_context: int, end_tokens: re.Pattern[str]
) -> Rendering:
    """The template's own text of a conversation that ends with an assistant turn.

    Every assistant turn after the first ``num_context`` messages is trained, with two exceptions. A turn from which the
    template drops words (its reasoning, once a question follows) is context: a model that is trained on it would learn
    to answer without reasoning. From the last turn nothing may be dropped: where the template would do so, the text
    is the generation prompt and the content of the file behind it, which is what the model generates when it answers.

    Args:
        render: the chat template.
        messages: the turns.
        num_context: turns at the beginning that are never trained.
        end_tokens: finds tokens that can end a turn.

    Raises:
        ChatError: a turn cannot be found in the text, or the template leaves out what has to be trained.
    """
    text = render(messages).rstrip()  # the line break after the last end token is not sampled
    last = len(messages) - 1
    turns = [number for number in range(num_context, last) if is_assistant(messages[number])]
    found = [(messages[number], _inner_turn(render, messages, number, text, end_tokens)) for number in turns]
    spans = [span for turn, span in found if not _lost_words(turn, text[span.start : span.end])]
    text, span = _last_turn(render, messages, text)
    return Rendering(text, (*spans, span))


def _inner_turn(
    render: Render, messages: Sequence[Message], number: int, text: str, end_tokens: re.Pattern[str]
) -> Span:
    """Span of turn ``number``, which other turns follow."""
    before, turn, after = messages[:number], messages[number], messages[number + 1 :]
    prompt, ended = render(before, True), render([*before, turn]).rstrip()
    if text.startswith(prompt) and text.startswith(ended) and len(ended) > len(prompt):
        return Span(len(prompt), len(ended))
    marked = _marked(turn)
    lead, mark, rest = render([*before, marked, *after]).rstrip().partition(MARK)
    lead_as_last, _, end_as_last = render([*before, marked]).rstrip().partition(MARK)
    if not mark or not text.endswith(rest):
        raise _not_found(number)
    end = len(text) - len(rest) + _length_of_end(rest, end_as_last, end_tokens, number)
    start = len(prompt) if text.startswith(prompt) else _start_in(lead, prompt, lead_as_last, len(render(before)))
    if start is None or not text.startswith(lead[:start]) or start > end:
        raise _not_found(number)
    return Span(start, end)


def _start_in(lead: str, prompt: str, lead_as_last: str, len_before: int) -> int | None:
    """First character of a turn that other turns follow; None where it cannot be found.

    Args:
        lead: the text up to the content of the turn.
        prompt: the conversation before the turn, with the generation prompt.
        lead_as_last: the text up to the content of the turn, were it the last one.
        len_before: characters of the conversation before the turn, without the generation prompt.
    """
    for cut in _cuts(prompt, _same(prompt, lead_as_last)):
        header = prompt[min(len_before, cut) : cut]
        start = lead.rfind(header) + len(header)
        added = lead[start:]  # such as an empty thinking block
        if header in lead and (added == lead_as_last[cut:] or not _TAG.sub("", added).strip()):
            return start
    return None


def _cuts(prompt: str, agreed: int) -> list[int]:
    """Where a turn may begin, best first: at the end of the prompt, or before tags there that only some turns have.

    Args:
        prompt: a conversation with the generation prompt.
        agreed: characters of it that come before the turn in the text as well.
    """
    tags = _TAGS_AT_END.search(prompt)
    starts = [] if tags is None else [tags.start() + tag.start() for tag in _TAG.finditer(tags[0])]
    return [cut for cut in (len(prompt), *reversed(starts)) if cut <= agreed]


def _last_turn(render: Render, messages: Sequence[Message], text: str) -> tuple[str, Span]:
    """(text, span of its last turn); where the template drops words, the text ends with the content of the file."""
    *before, turn = messages
    prompt = render(before, True)
    lead, mark, end = render([*before, _marked(turn)]).rstrip().partition(MARK)
    if not end:
        raise ChatError(
            "the chat template puts no token after an assistant turn, so no model could learn to stop"
            if mark
            else "the chat template leaves out the content of assistant turns"
        )
    start = next((cut for cut in _cuts(prompt, _same(prompt, text)) if cut <= _same(prompt, lead)), None)
    if start is None:
        raise ChatError("the chat template opens an assistant turn otherwise than it asks for one")
    opened, written = prompt[start:], text[start:]
    dropped = next((key for key in _REASONING_KEYS if lost(turn.get(key), written)), None)
    if dropped is not None:
        raise ChatError(f"the chat template leaves out '{dropped}' of the last turn; write it into the content")
    content = str(turn.get("content") or "")
    continuation = _without_opened_tag(content, prompt)
    is_opened_twice = continuation != content and (opened or _count_opened(prompt, written))
    if not lost(content, written) and not is_opened_twice:
        return text, Span(start, len(text))
    if turn.get("tool_calls"):
        raise ChatError("the chat template leaves out part of the last turn, which has tool calls")
    before_turn = text[:start] + opened
    return before_turn + continuation + end, Span(len(before_turn), len(before_turn + continuation + end))


def _marked(turn: Message) -> Message:
    """The turn with the mark as content, and without reasoning."""
    kept = {name: turn[name] for name in ("role", "tool_calls") if turn.get(name)}
    return {**kept, "content": MARK}


def _length_of_end(rest: str, end_as_last: str, end_tokens: re.Pattern[str], number: int) -> int:
    """Characters at the beginning of ``rest`` that still belong to the turn before it.

    Args:
        rest: the text that follows the content of the turn.
        end_as_last: what would follow it were the turn the last one.
        end_tokens: finds tokens that can end a turn.
        number: of the turn, for errors.
    """
    if rest.startswith(end_as_last):
        return len(end_as_last)
    same = _same(rest, end_as_last)  # such as "<|end|>\n" of "<|end|>\n<|user|>" and "<|end|>\n<|endoftext|>"
    tokens = list(end_tokens.finditer(rest))
    inside = [token.end() for token in tokens if token.end() <= same]
    across = [token.end() for token in tokens if token.start() <= same < token.end()]  # "<|end|>" against "<|return|>"
    if not inside and not across:
        raise _not_found(number)
    return max(inside, default=0) or across[0]


def _without_opened_tag(content: str, prompt: str) -> str:
    """The content without the tag that the generation prompt has opened already, where it repeats it."""
    opened = _OPENED_TAG.search(prompt)
    if opened is None or not content.lstrip().startswith(opened[1]):
        return content
    return content.lstrip().removeprefix(opened[1]).removeprefix(opened[2])


def _count_opened(prompt: str, written: str) -> int:
    """How often the tag that the generation prompt opens occurs in the text behind it."""
    opened = _OPENED_TAG.search(prompt)
    return 0 if opened is None else written.count(opened[1])


def _lost_words(turn: Message, written: str) -> bool:
    """Whether words of the turn are missing from what the template wrote."""
    return any(lost(turn.get(key), written) for key in ("content", *_REASONING_KEYS))


def lost(value: object, written: str) -> bool:
    """Whether a word of a text is missing from what the template wrote."""
    return isinstance(value, str) and bool(_words(value) - _words(written))


def _words(text: str) -> Counter[str]:
    """Words with the number of times they occur; tags are none, since templates add empty thinking blocks."""
    return Counter(re.findall(r"\w+", _TAG.sub(" ", text)))


def _same(first: str, second: str) -> int:
    """Characters that both begin with; comparing beginnings is far quicker than comparing one by one."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def _not_found(number: int) -> ChatError:
    return ChatError(f"turn {number + 1} cannot be found in what the chat template writes of the whole conversation")
