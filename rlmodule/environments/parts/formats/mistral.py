"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and ``[TOOL_CALLS]NAME[ARGS]{...}`` since 2025: Mistral."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import TOOL_FORMATS, MalformedCall, ToolCall, not_json, read_call

_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?\[ARGS\]")


@TOOL_FORMATS.register
@dataclass(frozen=True)
class Mistral:
    """Calls behind a mark; a list of them in older models, one mark to each in newer ones."""

    marks: ClassVar[tuple[str, ...]] = (_MARK,)

    def calls(self, completion: Completion) -> list[ToolCall | MalformedCall]:
        """What stands behind the marks."""
        _, *parts = (completion.raw_text or completion.text).split(_MARK)
        return [call for part in parts for call in _read(part)]

    def written(self, call: ToolCall) -> str:
        """The call in a list, as the older models write it."""
        content = json.dumps([{"name": call.name, "arguments": dict(call.arguments)}], ensure_ascii=False)
        return f"{_MARK}{content}"


def _read(part: str) -> list[ToolCall | MalformedCall]:
    named = _NAMED.match(part)
    try:
        value, _ = json.JSONDecoder().raw_decode(part[named.end() if named else 0 :].lstrip())
    except (ValueError, RecursionError) as error:
        return [not_json(error)]
    if named:
        return [read_call({"name": named[1], "arguments": value})]
    return [read_call(call) for call in value] if isinstance(value, list) else [read_call(value)]
