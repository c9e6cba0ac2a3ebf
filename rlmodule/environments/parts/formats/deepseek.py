"""A name and JSON between marks of their own: DeepSeek V3.1; with a kind and a code block V3 and R1."""

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


def _mark(words: str) -> str:
    """One of the family's marks, which are written with characters of their own."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _SEPARATES, _END = _mark("tool call begin"), _mark("tool sep"), _mark("tool call end")
_ALL_BEGIN, _ALL_END = _mark("tool calls begin"), _mark("tool calls end")
_KIND = "function"  # in the older form before the mark, where the newer one has the name
_BLOCK = re.compile(r"\s*```(?:json)?\s*")


@TOOL_FORMATS.register
@dataclass(frozen=True)
class DeepSeek:
    """Calls between marks; several of them one after the other."""

    marks: ClassVar[tuple[str, ...]] = (_ALL_BEGIN, _BEGIN)

    def calls(self, completion: Completion) -> list[ToolCall | MalformedCall]:
        """What stands between the marks."""
        text = after_reasoning(completion.raw_text or completion.text, _BEGIN, _END)
        _, *parts = text.split(_BEGIN)
        return [_read(part) for part in parts]

    def written(self, call: ToolCall) -> str:
        """The call as V3.1 writes it."""
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        return f"{_ALL_BEGIN}{_BEGIN}{call.name}{_SEPARATES}{arguments}{_END}{_ALL_END}"


def _read(part: str) -> ToolCall | MalformedCall:
    content, end, _ = part.partition(_END)
    name, mark, rest = content.partition(_SEPARATES)
    if not end or not mark:
        return MalformedCall(f"a call is {_BEGIN}NAME{_SEPARATES}{{...}}{_END}")
    if name.strip() == _KIND and not rest.lstrip().startswith("{"):
        name, _, rest = rest.partition("\n")
        rest = _BLOCK.sub("", rest)
    try:
        return read_call({"name": name.strip(), "arguments": json.loads(rest)})
    except (ValueError, RecursionError) as error:
        return not_json(error)
