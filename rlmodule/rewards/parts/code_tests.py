"""Tests of programs as data sets write them, brought into one form. Leaves out running them (``code_runner.py``)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Test = dict[str, Any]
FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+.#-]*)")
LINE_END = re.compile(r"\r\n?|\n")  # of Python; splitlines() knows more, also inside of strings
PYTHON_NAMES = ("python", "py", "python3", "")


def code_of(text: str, *, fenced_only: bool) -> str | None:
    """The last closed block of Python in a response; else the whole response, or None where only blocks count."""
    last: str | None = None
    fence, name, lines = "", "", list[str]()
    for line in LINE_END.split(text):
        mark = FENCE.match(line)
        if not fence and mark:
            fence, name, lines = mark[1], mark[2].lower(), []
        elif fence and mark and mark[1].startswith(fence) and not line.strip(" \t`~"):
            last = "\n".join(lines) if name in PYTHON_NAMES else last
            fence = ""
        else:
            lines.append(line)
    return last if last is not None or fenced_only else text.strip() or None


def read_tests(value: Any, entry_point: str | None = None) -> list[Test]:
    """Tests of a row.

    Args:
        value: asserts (a text, or a list of texts), ``{"inputs": [...], "outputs": [...], "fn_name": ...}`` (APPS,
            TACO, PRIME), or a list of ``{"input": ..., "output": ...}`` (LiveCodeBench, DeepCoder); or JSON text.
        entry_point: name of the function that ``check(candidate)`` is called with (HumanEval).

    Raises:
        ValueError: it is none of these, or empty.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        tests = _from_columns(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        tests = [_from_entry(entry, entry_point) for entry in value]
    else:
        raise ValueError(f"tests are asserts, or inputs and outputs, not {value!r:.200}")
    if not tests:
        raise ValueError("there is no test in it")
    codes = [test["code"] for test in tests if test["kind"] == "assert"]
    if len(codes) == len(tests) and not any(_says_something(code) for code in codes):
        raise ValueError(f"nothing that runs is a test in {codes[0][:100]!r}")
    return tests


def _asserts(code: Any, entry_point: Any) -> Test:
    """A test of code, with a call of each test function in it that nothing calls."""
    if not isinstance(code, str) or not code.strip():
        raise ValueError(f"a test is code, or an input and an output, not {code!r:.200}")
    calls = [_call_of(function, entry_point) for function in _uncalled(_parsed(code))]
    return {"kind": "assert", "code": "\n".join([code, *calls, ""]) if calls else code}


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test {code[:100]!r} is no Python: {error}") from None


def _uncalled(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """HumanEval's ``check(candidate)`` and pytest's ``test_...()`` that no other line names."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = {node.id for statement in tree.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return [f for f in functions if (f.name == "check" or f.name.startswith("test")) and f.name not in named]


def _call_of(function: ast.FunctionDef | ast.AsyncFunctionDef, entry_point: Any) -> str:
    given = function.args
    needed = len(given.posonlyargs + given.args) - len(given.defaults)
    needed += sum(default is None for default in given.kw_defaults)
    if function.name == "check" and needed == 1:
        if not isinstance(entry_point, str) or not entry_point.strip():
            raise ValueError("it defines check(candidate), and no column says what is to be checked (reward.entry_key)")
        call = f"check({entry_point.strip()})"
        _parsed(call)
        return call
    if needed or isinstance(function, ast.AsyncFunctionDef):
        raise ValueError(f"{function.name} takes arguments or is a coroutine, and nothing here can call it")
    return f"{function.name}()"


def _says_something(code: str) -> bool:
    """Whether a line that runs can fail: what stands in functions, classes and main blocks does not run by itself."""
    asleep = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    awake = [node for node in _parsed(code).body if not isinstance(node, asleep) and not _is_main_block(node)]
    return any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for top in awake for node in ast.walk(top))


def _is_main_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}


def _from_columns(value: Mapping[str, Any]) -> list[Test]:
    inputs, outputs, name = value["inputs"], value["outputs"], value.get("fn_name")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError("'inputs' and 'outputs' must be lists of one length")
    return [_pair(given, output, name) for given, output in zip(inputs, outputs, strict=True)]


def _from_entry(entry: Any, entry_point: str | None) -> Test:
    if not isinstance(entry, Mapping):
        return _asserts(entry, entry_point)
    if "input" not in entry or "output" not in entry:
        raise ValueError(f"a test needs 'input' and 'output', found {', '.join(map(str, entry)) or 'nothing'}")
    details = entry.get("metadata") or {}
    details = json.loads(details) if isinstance(details, str) else details
    if not isinstance(details, Mapping):
        raise ValueError(f"the metadata of a test is a mapping, not {details!r:.200}")
    name = entry.get("fn_name") or details.get("func_name") or details.get("fn_name")
    return _pair(entry["input"], entry["output"], name)


def _pair(given: Any, output: Any, name: str | None) -> Test:
    if name is None:
        return {"kind": "stdin", "input": _as_lines(given), "output": _as_lines(output)}
    arguments = [json.loads(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"the input of {name} is a list of its arguments, not {arguments!r:.200}")
    expected = json.loads(output) if isinstance(output, str) and isinstance(given, str) else output
    # APPS wraps the one result in a list; a function may as well return a list of one.
    outputs = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else [])]
    return {"kind": "call", "name": str(name), "arguments": list(arguments), "outputs": outputs}


def _as_lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
