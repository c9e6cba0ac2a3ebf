"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and ``[TOOL_CALLS]NAME[ARGS]{...}`` since 2025: Mistral."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import TOOL_FORMATS, MalformedCall, ToolCall, not_json, read_call

_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]|(?={))")
_THOUGHT = re.compile(r"\[THINK\].*?(?:\[/THINK\]|$)", re.DOTALL)


@TOOL_FORMATS.register
@dataclass(frozen=True)
class Mistral:
    """Calls behind a mark; a list of them in older models, one mark to each in newer ones."""

    marks: ClassVar[tuple[str, ...]] = (_MARK,)

    def calls(self, completion: Completion) -> list[ToolCall | MalformedCall]:
        """What stands behind the marks."""
        text, found = _THOUGHT.sub("", completion.raw_text or completion.text), list[ToolCall | MalformedCall]()
        place = text.find(_MARK)
        while place >= 0:
            calls, end = _read(text, place + len(_MARK))
            found += calls
            place = text.find(_MARK, end)
        return found

    def written(self, call: ToolCall) -> str:
        """The call in a list, as the older models write it."""
        content = json.dumps([{"name": call.name, "arguments": dict(call.arguments)}], ensure_ascii=False)
        return f"{_MARK}{content}"


def _read(text: str, start: int) -> tuple[list[ToolCall | MalformedCall], int]:
    """(the calls behind the mark that ends at ``start``, where they end); their texts may have marks in them."""
    named = _NAMED.match(text, start)
    begin = named.end() if named else start
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        return [not_json(error)], start
    if named:
        return [read_call({"name": named[1], "arguments": value})], end
    if isinstance(value, list):
        return [read_call(call) for call in value] or [MalformedCall("the list of calls is empty")], end
    return [read_call(value)], end
