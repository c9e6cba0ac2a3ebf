"""``<function=NAME><parameter=KEY>value</parameter></function>`` inside ``<tool_call>``: Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import TOOL_FORMATS, Call, MalformedCall, ToolCall, calls_in

_OPENS, _CLOSES, _ENDS = "<function=", "</function>", "</parameter>"
_NAME = re.compile(r"([^>\n]*)>")
_BEGIN = re.compile(r"\s*<parameter=([^>\n]*)>\n?")
_END = re.compile(rf"\s*{_CLOSES}")


@TOOL_FORMATS.register
@dataclass(frozen=True)
class QwenXml:
    """Values are bare text; those of parameters that are no texts are read as JSON once the schema is known."""

    marks: ClassVar[tuple[str, ...]] = ("<function=",)

    def calls(self, completion: Completion) -> list[Call]:
        """Every function that is named; a <tool_call> without one is malformed."""
        text = completion.raw_text or completion.text
        return calls_in(text, _OPENS, _CLOSES, _read) or calls_in(text, "<tool_call>", "", _without_function)[:1]

    def written(self, call: ToolCall) -> str:
        """One tag on each line, values between them."""
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in call.arguments.items()}
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _read(text: str, start: int) -> tuple[list[Call], int]:
    """(the function whose name begins at ``start``, where it ends); its values may have tags in them."""
    name = _NAME.match(text, start)
    if name is None:
        return [MalformedCall("a <function=NAME> has no name that > ends")], start
    found, place = dict[str, str](), name.end()
    while begin := _BEGIN.match(text, place):
        stop = text.find(_ENDS, begin.end())
        value = text[begin.end() : stop]
        if stop < 0 or _OPENS in value.partition(_CLOSES)[2]:  # the tag found is that of another function
            return [MalformedCall("a <parameter=NAME> is not closed by </parameter>")], start
        found[begin[1].strip()] = value.removesuffix("\n")
        place = stop + len(_ENDS)
    if closed := _END.match(text, place):
        return [ToolCall(name[1].strip(), found, is_bare=True)], closed.end()
    return [MalformedCall(f"<function={name[1]}> holds something beside <parameter=NAME>...</parameter>")], start


def _without_function(text: str, start: int) -> tuple[list[Call], int]:
    return [MalformedCall("a <tool_call> holds no <function=NAME>")], start
