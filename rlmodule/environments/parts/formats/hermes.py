"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many after them."""

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

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_END = re.compile(rf"\s*{_CLOSES}")


@TOOL_FORMATS.register
@dataclass(frozen=True)
class Hermes:
    """JSON between two tags; several calls one after the other, text may come before them."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def calls(self, completion: Completion) -> list[Call]:
        """What stands between the tags."""
        return calls_in(completion.raw_text or completion.text, _OPENS, _CLOSES, _read)

    def written(self, call: ToolCall) -> str:
        """The call between tags, each on a line of its own."""
        content = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{content}\n</tool_call>"


def _read(text: str, start: int) -> tuple[list[Call], int]:
    """(the call that begins at ``start``, where it ends); its texts may have tags in them."""
    value, end = decode_json(text, start)
    if closed := _END.match(text, end):
        return [read_call(value)], closed.end()
    return [MalformedCall("more than one JSON object is in a <tool_call>, or something behind it")], start
