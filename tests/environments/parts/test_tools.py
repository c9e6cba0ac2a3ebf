"""Tools are described by their signatures, run apart from the trainer, and answer whatever they are asked."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.environments.parts.tool_calls import MalformedCall, ToolCall
from rlmodule.environments.parts.tools import Tool, Toolbox, ToolLimits
from tests.environments.parts.tools_to_test import add, misbehave, say, undescribed


@pytest.fixture(scope="module")
def box():
    return Toolbox([Tool.of(add), Tool.of(say), Tool.of(misbehave)], ToolLimits(0.5, 256, 40))


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
    ("how", "text"),
    [
        ("print", "[1, 2]"),
        ("fork", "[1, 2]"),
        ("write", "error: PermissionError"),
        ("object", "error: TypeError"),
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
