"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many after them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import (
    TOOL_FORMATS,
    MalformedCall,
    ToolCall,
    after_reasoning,
    not_json,
    read_call,
)

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_END = re.compile(rf"\s*{_CLOSES}")


@TOOL_FORMATS.register
@dataclass(frozen=True)
class Hermes:
    """JSON between two tags; several calls one after the other, text may come before them."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def calls(self, completion: Completion) -> list[ToolCall | MalformedCall]:
        """What stands between the tags."""
        text, found = after_reasoning(completion.raw_text or completion.text), list[ToolCall | MalformedCall]()
        place = text.find(_OPENS)
        while place >= 0:
            call, place = _read(text, place + len(_OPENS))
            found.append(call)
            place = text.find(_OPENS, place)
        return found

    def written(self, call: ToolCall) -> str:
        """The call between tags, each on a line of its own."""
        content = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{content}\n</tool_call>"


def _read(text: str, start: int) -> tuple[ToolCall | MalformedCall, int]:
    """(the call that begins at ``start``, where it ends); its texts may have tags in them."""
    start += len(text[start:]) - len(text[start:].lstrip())
    closed = text.find(_CLOSES, start)
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        found, after = read_call(value), _END.match(text, end)
    except (ValueError, RecursionError) as error:
        found, after, end = not_json(error), None, start
    if after is not None:
        return found, after.end()
    if closed < 0:
        return MalformedCall("a <tool_call> is not closed by </tool_call>"), len(text)
    return found if end == start else MalformedCall("more than one JSON object is in a <tool_call>"), closed
