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

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)


@TOOL_FORMATS.register
@dataclass(frozen=True)
class Hermes:
    """JSON between two tags; several calls one after the other, text may come before them."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def calls(self, completion: Completion) -> list[ToolCall | MalformedCall]:
        """What stands between the tags."""
        return [_read(*found) for found in _CALL.findall(after_reasoning(completion.raw_text or completion.text))]

    def written(self, call: ToolCall) -> str:
        """The call between tags, each on a line of its own."""
        content = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{content}\n</tool_call>"


def _read(content: str, end: str) -> ToolCall | MalformedCall:
    if not end:
        return MalformedCall("a <tool_call> is not closed by </tool_call>")
    try:
        return read_call(json.loads(content))
    except (ValueError, RecursionError) as error:
        return not_json(error)
