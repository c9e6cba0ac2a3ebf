"""A name and JSON between marks of their own: DeepSeek V3.1; with a kind and a code block V3 and R1."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import (
    TOOL_FORMATS,
    Call,
    MalformedCall,
    ToolCall,
    calls_in,
    decode_json,
    read_call,
)


def _mark(words: str) -> str:
    """One of the family's marks, which are written with characters of their own."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _SEPARATES, _END = _mark("tool call begin"), _mark("tool sep"), _mark("tool call end")
_ALL_BEGIN, _ALL_END = _mark("tool calls begin"), _mark("tool calls end")
# A name; in the older form a kind, and behind the mark a name on a line of its own and a code block.
_HEAD = re.compile(rf"([^\n{_END[0]}]*){_SEPARATES}(?:([^\n{{`]*)\n)?\s*(?:```(?:json)?\s*)?")
_TAIL = re.compile(rf"\s*(?:```\s*)?{_END}")
_FORM = MalformedCall(f"a call is {_BEGIN}NAME{_SEPARATES}{{...}}{_END}")


@TOOL_FORMATS.register
@dataclass(frozen=True)
class DeepSeek:
    """Calls between marks; several of them one after the other."""

    marks: ClassVar[tuple[str, ...]] = (_ALL_BEGIN, _BEGIN)

    def calls(self, completion: Completion) -> list[Call]:
        """What stands between the marks."""
        return calls_in(completion.raw_text or completion.text, _BEGIN, _END, _read)

    def written(self, call: ToolCall) -> str:
        """The call as V3.1 writes it."""
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        return f"{_ALL_BEGIN}{_BEGIN}{call.name}{_SEPARATES}{arguments}{_END}{_ALL_END}"


def _read(text: str, start: int) -> tuple[list[Call], int]:
    """(the call that begins at ``start``, where it ends); its texts may have marks in them."""
    head = _HEAD.match(text, start)
    if head is None:
        return [_FORM], start
    value, end = decode_json(text, head.end())
    tail = _TAIL.match(text, end)
    if tail is None:
        return [_FORM], start
    return [read_call({"name": (head[2] or head[1]).strip(), "arguments": value})], tail.end()
