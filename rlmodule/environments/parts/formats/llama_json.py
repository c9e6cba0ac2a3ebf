"""``{"name": ..., "parameters": {...}}`` as the whole response, perhaps behind ``<|python_tag|>``: Llama 3.1 to 3.3."""

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

_TAG = "<|python_tag|>"
_NO_TAGS = (_TAG, "<|eom_id|>")
_MARK = re.compile(r"<\|[a-z_]+\|>")  # <|python_tag|>, <|eom_id|>, <|eot_id|>
_CALL = re.compile(r'\{\s*"(type|name|parameters|arguments|function)"\s*:')


@TOOL_FORMATS.register
@dataclass(frozen=True)
class LlamaJson:
    """A response is a call or an answer as a whole; several calls are divided by semicolons."""

    marks: ClassVar[tuple[str, ...]] = (_TAG, '{"name": function name, "parameters"')

    def calls(self, completion: Completion) -> list[ToolCall | MalformedCall]:
        """The calls that the response is made of."""
        text = after_reasoning(completion.raw_text or completion.text, *_NO_TAGS)
        rest, found = _MARK.sub("", text).strip(), list[ToolCall | MalformedCall]()
        if _TAG not in text and not _CALL.match(rest):
            return []
        while rest:
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError) as error:
                return [*found, not_json(error)]
            is_other = isinstance(value, dict) and "parameters" not in value
            if _TAG not in text and is_other and "arguments" not in value:
                return found  # an object that answers
            found.append(read_call(value, "arguments" if is_other and "arguments" in value else "parameters"))
            rest = rest[end:].lstrip(" ;\n")
        return found

    def written(self, call: ToolCall) -> str:
        """The call as one JSON object."""
        return json.dumps({"name": call.name, "parameters": dict(call.arguments)}, ensure_ascii=False)
