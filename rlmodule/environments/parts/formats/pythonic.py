"""``[f(a=1), g(b="x")]`` as the whole response or between marks: Llama 3.2 and 4, LFM2; models without a format."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.episodes import Completion
from rlmodule.environments.parts.tool_calls import TOOL_FORMATS, Call, MalformedCall, ToolCall, behind_thought

_CALL = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_MARKS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
_CLOSED = re.compile(
    "|".join(f"{re.escape(start)}(.*?)(?:{re.escape(end)}|$)" for start, end in _MARKS.items()), re.DOTALL
)
_JSON_NAMES = {"true": True, "false": False, "null": None}


@TOOL_FORMATS.register
@dataclass(frozen=True)
class Pythonic:
    """A list of calls with named arguments, which are Python literals; nothing of it is executed."""

    marks: ClassVar[tuple[str, ...]] = (*_MARKS, "[func_name1(params_name1=")

    def calls(self, completion: Completion) -> list[Call]:
        """The calls of the list; a response that does not begin like one, and has no marks, answers."""
        said = behind_thought(completion.raw_text or completion.text, _CALL)
        lists = ["".join(found.groups("")) for found in _CLOSED.finditer(said)]
        if not lists:
            said = behind_thought(completion.text, _CALL)
            lists = [said] if _CALL.match(said) else []
        return [call for text in lists for call in _calls(text.strip())]

    def written(self, call: ToolCall) -> str:
        """The call in a list; texts in double quotes."""
        arguments = ", ".join(f"{name}={_literal(value)}" for name, value in call.arguments.items())
        return f"[{call.name}({arguments})]"


_NOT_A_LIST = MalformedCall("the calls are not a list")


def _calls(text: str) -> list[Call]:
    """The calls of a list."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the policy's Python, such as "\\d" in a text
            tree = _JSONNames().visit(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [MalformedCall("the calls are not a valid Python list")]
    return [_read(node) for node in tree.elts] if isinstance(tree, ast.List) else [_NOT_A_LIST]


class _JSONNames(ast.NodeTransformer):
    """JSON's names of values, which models write as well, in the place of Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A value for a name that is one."""
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


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
