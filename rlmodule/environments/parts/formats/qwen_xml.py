"""``<function=NAME><parameter=KEY>value</parameter></function>`` inside ``<tool_call>``: Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import TOOL_FORMATS, MalformedCall, ToolCall, after_reasoning

_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(</function>|$)", re.DOTALL)
_BEGIN = re.compile(r"\s*<parameter=([^>\n]*)>\n?")
_CLOSES = "</parameter>"


@TOOL_FORMATS.register
@dataclass(frozen=True)
class QwenXml:
    """Values are bare text; those of parameters that are no texts are read as JSON once the schema is known."""

    marks: ClassVar[tuple[str, ...]] = ("<function=",)

    def calls(self, completion: Completion) -> list[ToolCall | MalformedCall]:
        """Every function that is named; a <tool_call> without one is malformed."""
        text = after_reasoning(completion.raw_text or completion.text)
        found = [_read(*function) for function in _FUNCTION.findall(text)]
        if not found and "<tool_call>" in text:
            return [MalformedCall("a <tool_call> holds no <function=NAME>")]
        return found

    def written(self, call: ToolCall) -> str:
        """One tag on each line, values between them."""
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in call.arguments.items()}
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _read(name: str, content: str, end: str) -> ToolCall | MalformedCall:
    if not end:
        return MalformedCall(f"<function={name}> is not closed by </function>")
    found, place = dict[str, str](), 0
    while begin := _BEGIN.match(content, place):
        stop = content.find(_CLOSES, begin.end())
        if stop < 0:
            return MalformedCall("a <parameter=NAME> is not closed by </parameter>")
        found[begin[1].strip()] = content[begin.end() : stop].removesuffix("\n")
        place = stop + len(_CLOSES)
    if content[place:].strip():
        return MalformedCall(f"<function={name}> holds something beside <parameter=NAME>...</parameter>")
    return ToolCall(name.strip(), found)
