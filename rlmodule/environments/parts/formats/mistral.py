"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and ``[TOOL_CALLS]NAME[ARGS]{...}`` since 2025: Mistral."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import (
    THOUGHT,
    TOOL_FORMATS,
    Call,
    MalformedCall,
    ToolCall,
    calls_in,
    decode_json,
    read_call,
)

_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]|(?={))")
_THOUGHTS = {"[THINK]": "[/THINK]", **THOUGHT}


@TOOL_FORMATS.register
@dataclass(frozen=True)
class Mistral:
    """Calls behind a mark; a list of them in older models, one mark to each in newer ones."""

    marks: ClassVar[tuple[str, ...]] = (_MARK,)

    def calls(self, completion: Completion) -> list[Call]:
        """What stands behind the marks."""
        return calls_in(completion.raw_text or completion.text, _MARK, "", _read, _THOUGHTS)

    def written(self, call: ToolCall) -> str:
        """The call in a list, as the older models write it."""
        content = json.dumps([{"name": call.name, "arguments": dict(call.arguments)}], ensure_ascii=False)
        return f"{_MARK}{content}"


def _read(text: str, start: int) -> tuple[list[Call], int]:
    """(the calls behind the mark that ends at ``start``, where they end); their texts may have marks in them."""
    named = _NAMED.match(text, start)
    value, end = decode_json(text, named.end() if named else start)
    if named:
        return [read_call({"name": named[1], "arguments": value})], end
    if isinstance(value, list):
        return [read_call(call) for call in value] or [MalformedCall("the list of calls is empty")], end
    return [read_call(value)], end
