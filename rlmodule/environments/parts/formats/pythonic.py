"""``[f(a=1), g(b="x")]`` as the whole response: Llama 3.2 and 4, and models that have learned no format."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import TOOL_FORMATS, MalformedCall, ToolCall, after_reasoning

_CALL = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_MARKS = ("<|python_start|>", "<|python_end|>")


@TOOL_FORMATS.register
@dataclass(frozen=True)
class Pythonic:
    """A list of calls with named arguments, which are Python literals; nothing of it is executed."""

    marks: ClassVar[tuple[str, ...]] = (_MARKS[0], "[func_name1(params_name1=")

    def calls(self, completion: Completion) -> list[ToolCall | MalformedCall]:
        """The calls of the list; a response that does not begin like one answers."""
        text = after_reasoning(completion.text, *_MARKS)
        for mark in _MARKS:
            text = text.replace(mark, "")
        if not _CALL.match(text.strip()):
            return []
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return [MalformedCall("the calls are not a valid Python list")]
        return [_read(node) for node in tree.elts] if isinstance(tree, ast.List) else [_NOT_A_LIST]

    def written(self, call: ToolCall) -> str:
        """The call in a list; texts in double quotes."""
        arguments = ", ".join(f"{name}={_literal(value)}" for name, value in call.arguments.items())
        return f"[{call.name}({arguments})]"


_NOT_A_LIST = MalformedCall("the calls are not a list")


def _read(node: ast.expr) -> ToolCall | MalformedCall:
    if not isinstance(node, ast.Call):
        return MalformedCall("an entry of the list is no call")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return MalformedCall("arguments are given by name, as in f(x=1)")
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        json.dumps(arguments)  # sets, bytes and complex numbers are of Python alone
    except (ValueError, TypeError, RecursionError, MemoryError):
        return MalformedCall("arguments are numbers, texts, lists and mappings")
    return ToolCall(ast.unparse(node.func), arguments)


def _literal(value: object) -> str:
    text = repr(value)
    is_plain = isinstance(value, str) and not set(value) & set("'\"\\") and value.isprintable()
    return f'"{value}"' if is_plain else text
