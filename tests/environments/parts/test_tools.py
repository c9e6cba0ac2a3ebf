"""Tools are described by their signatures, run apart from the trainer, and answer whatever they are asked."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.environments.parts.tool_calls import MalformedCall, ToolCall
from rlmodule.environments.parts.tools import Tool, Toolbox, ToolLimits, what_went_wrong
from tests.environments.parts.tools_to_test import (
    Shelf,
    add,
    by_place,
    choose,
    collect,
    later,
    misbehave,
    misspelt,
    say,
    undescribed,
)


@pytest.fixture(scope="module")
def box():
    return Toolbox([Tool.of(add), Tool.of(say), Tool.of(misbehave), Tool.of(later)], ToolLimits(0.5, 256, 40))


def test_a_tool_is_described_by_its_signature_and_docstring(box):
    assert box.schemas[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer"},
        },
    }


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", {"a": 2, "b": 3}, "5"),
        ("add", {"a": "2"}, "3"),  # a format without types gives text
        ("say", {"text": "2"}, "2"),
        ("say", {"text": "ab", "times": None}, "ab"),
        ("say", {"text": "ab" * 30}, f"{'ab' * 20}... (20 more characters)"),
        ("misbehave", {"how": "not"}, "[1, 2]"),
        ("later", {"mode": "add", "xs": ["1", 2.0]}, "3"),
        ("later", {"mode": "none", "xs": []}, "null"),
    ],
)
def test_a_call_gives_its_result_as_text(box, name, arguments, text):
    result = box.run(ToolCall(name, arguments))
    assert (result.text, result.is_error) == (text, False)


@pytest.mark.parametrize(
    ("call", "because"),
    [
        (MalformedCall("not JSON"), "error: not JSON"),
        (ToolCall("subtract", {}), "error: there is no tool 'subtract'"),
        (ToolCall("add", {}), "error: add needs the argument 'a'"),
        (ToolCall("add", {"a": 1, "c": 2}), "error: add has no argument 'c'"),
        (ToolCall("add", {"a": "x"}), 'error: a must be integer, got "x"'),
        (ToolCall("add", {"a": True}), "error: a must be integer, got true"),
        (ToolCall("say", {"text": 3}), "error: text must be string, got 3"),
        (ToolCall("misbehave", {"how": "raise"}), "error: ValueError: no good"),
        (ToolCall("misbehave", {"how": "raise lines"}), "error: ValueError: first\nsecond"),
        (ToolCall("misbehave", {"how": "raise again"}), "error: RuntimeError: in the end"),
        (ToolCall("later", {"mode": "sub", "xs": [1]}), 'error: mode must be one of "add", "none"'),
        (ToolCall("later", {"mode": "add", "xs": [1, "a"]}), "error: xs[1] must be integer"),
        (ToolCall("misbehave", {"how": "hang"}), "error: no result within 0.5 seconds"),
        (ToolCall("misbehave", {"how": "die"}), "error: the process that ran it ended wit"),
        (ToolCall("misbehave", {"how": "grow"}), "error: MemoryError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_call_that_goes_wrong_is_an_error_to_read(box, call, because):
    result = box.run(call)
    assert result.is_error
    assert result.text.startswith(because)
    assert box.run(ToolCall("misbehave", {"how": "not"})).text == "[1, 2]", "the next call is served"


def test_of_several_errors_at_once_one_is_told():
    """As Python draws what tasks of a group have raised."""
    drawn = """  + Exception Group Traceback (most recent call last):
  |   File "tools.py", line 9, in work
  |     async with asyncio.TaskGroup() as group:
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "tools.py", line 4, in part
    |     raise ValueError("no good")
    | ValueError: no good
    +------------------------------------
"""
    assert what_went_wrong(drawn) == "ValueError: no good"
    assert what_went_wrong('...l.py", line 3, in f\n    g()\nValueError: cut\n') == "ValueError: cut"
    assert what_went_wrong("no result within 5 seconds") == "no result within 5 seconds"


def test_calls_from_several_threads_run_side_by_side(box):
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda a: box.run(ToolCall("add", {"a": a})).text, range(20)))
    assert results == [str(a + 1) for a in range(20)]


def test_what_children_could_not_import_or_nobody_describes_is_refused():
    def inner(a: int) -> int:
        """Inner.

        Args:
            a: A number.
        """
        return a

    with pytest.raises(ConfigError, match="the top of a module"):
        Tool.of(inner)
    with pytest.raises(ConfigError, match=r"cannot be described: .*undescribed"):
        Tool.of(undescribed)
    for limits in ({"seconds": 0}, {"memory_mb": 1}, {"characters": 0}):
        with pytest.raises(ConfigError, match="tool_"):
            ToolLimits(**limits)


@pytest.mark.parametrize(
    ("function", "because"),
    [
        (choose, "mode is an Enum"),
        (collect, "arguments by name, and xs has none"),
        (by_place, "arguments by name, and a has none"),
        (misspelt, "'intt' is not defined"),
        (Shelf().count, "a method of an object"),
        (Shelf.count, "self has no type"),
        (len, "cannot be described"),
        (3, "cannot be described"),
    ],
    ids=lambda part: getattr(part, "__qualname__", str(part)),
)
def test_what_no_call_could_reach_is_refused_at_the_start(function, because):
    with pytest.raises(ConfigError, match=f"cannot be described: .*{because}|{because}"):
        Tool.of(function)


def test_a_tool_may_import_others_of_its_package_by_dots(tmp_path, monkeypatch):
    """Its file alone could not be run; other files are, and bring no package along."""
    package = tmp_path / "tools_by_dots"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "numbers.py").write_text("THREE = 3\n")
    code = 'from .numbers import THREE\n\n\ndef three() -> int:\n    """Give three."""\n    return THREE\n'
    (package / "tool.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    tool = Tool.of(importlib.import_module("tools_by_dots.tool").three)
    assert Toolbox([tool]).run(ToolCall("three", {})).text == "3"
    assert Tool.of(add).path.endswith("tools_to_test.py:add")
    for name in [name for name in sys.modules if name.startswith("tools_by_dots")]:
        del sys.modules[name]


def test_two_tools_of_one_name_are_refused_and_none_can_be_called():
    with pytest.raises(ConfigError, match=r"environment=add: two of its tools have this name"):
        Toolbox([Tool.of(add), Tool.of(say), Tool.of(add)])
    assert Toolbox([]).run(ToolCall("add", {})).text == "error: there is no tool 'add'; there are none"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("print", "[1, 2]"),
        ("fork", "[1, 2]"),
        ("write", "error: PermissionError"),
        ("object", "error: it returned object, which cannot"),
        ("deep", "error: "),
        ("not a number", "NaN"),
        ("half a pair", "?"),
        ("exit", "error: SystemExit"),
    ],
)
def test_what_a_tool_does_beside_its_work_disturbs_no_other_call(box, how, text):
    result = box.run(ToolCall("misbehave", {"how": how}))
    assert result.text.startswith(text)
    assert result.is_error == text.startswith("error")
    assert box.run(ToolCall("add", {"a": 1})).text == "2"


def test_a_name_that_the_policy_makes_up_is_shown_to_nobody(box):
    assert box.name_of(ToolCall("\ud83d" * 9000, {})) == box.name_of(MalformedCall("x")) == "unknown"
    assert box.name_of(ToolCall("add", {})) == "add"
