"""``{"name": ..., "parameters": {...}}`` as the whole response, perhaps behind ``<|python_tag|>``: Llama 3.1 to 3.3."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import (
    TOOL_FORMATS,
    Call,
    ToolCall,
    behind_thought,
    decode_json,
    not_json,
    read_call,
)

_TAG = "<|python_tag|>"
_CALL = re.compile(r'\s*\{\s*"(type|name|parameters|arguments|function)"\s*:')
_BETWEEN = re.compile(r"(?:[\s;]|<\|[a-z_]+\|>)*")  # calls; marks such as <|eom_id|> and <|eot_id|>


@TOOL_FORMATS.register
@dataclass(frozen=True)
class LlamaJson:
    """A response is a call or an answer as a whole; several calls are divided by semicolons."""

    marks: ClassVar[tuple[str, ...]] = (_TAG, '{"name": function name, "parameters"')

    def calls(self, completion: Completion) -> list[Call]:
        """The calls that the response is made of; what is said before a mark or behind calls is none."""
        rest, tag = behind_thought(completion.raw_text or completion.text, _CALL), ""
        if not _CALL.match(rest):
            _, tag, rest = rest.partition(_TAG)
        found = list[Call]()
        while _CALL.match(rest) or (tag and not found):
            try:
                value, end = decode_json(rest)
            except (ValueError, RecursionError) as error:
                return [*found, not_json(error)]
            is_other = isinstance(value, dict) and "parameters" not in value
            if not tag and is_other and "arguments" not in value:
                break  # an object that answers
            found.append(read_call(value, "arguments" if is_other and "arguments" in value else "parameters"))
            rest = _BETWEEN.sub("", rest[end:], count=1)
        return found

    def written(self, call: ToolCall) -> str:
        """The call as one JSON object."""
        return json.dumps({"name": call.name, "parameters": dict(call.arguments)}, ensure_ascii=False)
