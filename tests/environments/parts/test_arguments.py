"""Arguments get the types of their schema, whatever a format knows of types; what does not fit is told in words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.environments.parts.arguments import as_described, read_arguments
from rlmodule.environments.parts.tool_calls import ToolCall

TEXT, WHOLE, NUMBER, TRUTH = ({"type": name} for name in ("string", "integer", "number", "boolean"))
LISTED = {"type": "array", "items": WHOLE}
MODE = {"type": "string", "enum": ["fast", "slow"]}
EITHER = {"type": ["integer", "string"]}


def function(schema, required=("x",)):
    return {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}, "required": list(required)}}


def read(value, schema, is_bare=False):
    """The argument that the tool gets."""
    found, wrong = read_arguments(function(schema), ToolCall("f", {"x": value}, is_bare))
    assert wrong is None
    return found["x"]


@pytest.mark.parametrize(
    ("value", "schema", "due"),
    [
        ("5", WHOLE, 5),
        (120000.0, WHOLE, 120000),  # lidge-jun/opencodex#1611
        ("2.5", NUMBER, 2.5),
        ("true", TRUTH, True),
        ("True", TRUTH, True),
        ("[1, 2]", LISTED, [1, 2]),
        (["1", 2.0], LISTED, [1, 2]),
        ({"a": "1"}, {"type": "object", "additionalProperties": WHOLE}, {"a": 1}),
        ({"a": "1", "b": 2}, {"type": "object", "properties": {"a": WHOLE}}, {"a": 1, "b": 2}),
        (["1", "a"], {"type": "array", "prefixItems": [WHOLE, TEXT]}, [1, "a"]),
        ("1", {"type": "integer", "enum": [1, 2]}, 1),
        (None, {**MODE, "nullable": True}, None),
        (None, {"anyOf": [WHOLE, {"type": "null"}]}, None),
        # A text stays one where a text may be due.
        ("007", TEXT, "007"),
        ("12", EITHER, "12"),
        ("[1]", {"anyOf": [LISTED, TEXT]}, "[1]"),
        (["1"], {"anyOf": [LISTED, {"type": "array", "items": TEXT}]}, ["1"]),
        ("x", {}, "x"),
        (3, {"type": "image"}, 3),
    ],
    ids=str,
)
def test_an_argument_gets_the_type_that_is_due(value, schema, due):
    found = read(value, schema)
    assert (found, type(found)) == (due, type(due))


@pytest.mark.parametrize(
    ("text", "schema", "due"),
    [
        ("5", WHOLE, 5),
        ("True", TRUTH, True),  # as Qwen3-Coder's own template writes it
        ("false", TRUTH, False),
        ("None", {**WHOLE, "nullable": True}, None),
        ("null", {**TEXT, "nullable": True}, None),
        ("['a', 'b']", {"type": "array", "items": TEXT}, ["a", "b"]),  # waybarrios/vllm-mlx#63
        ('[{"a": false, "b": null}]', {"type": "array"}, [{"a": False, "b": None}]),  # vllm-project/vllm#43238
        ('["a"]', {"anyOf": [{"type": "array", "items": TEXT}, TEXT]}, ["a"]),
        ('{"a": "1"}', {"type": "object", "additionalProperties": WHOLE}, {"a": 1}),
        ("12", EITHER, 12),
        ("1", {"type": "string", "enum": ["1", "2"]}, "1"),
        ("12", TEXT, "12"),
        ("None", TEXT, "None"),
        ("5", {**TEXT, "nullable": True}, "5"),
        ('{"a": 1}', {}, {"a": 1}),  # ml-explore/mlx-lm#1910
        ("123", {}, "123"),
    ],
    ids=str,
)
def test_a_text_without_a_type_is_read_as_what_is_due(text, schema, due):
    found = read(text, schema, is_bare=True)
    assert (found, type(found)) == (due, type(due))


@pytest.mark.parametrize(
    ("value", "schema", "because"),
    [
        ("x", WHOLE, 'x must be integer, got "x"'),
        (1.5, WHOLE, "x must be integer, got 1.5"),
        (True, WHOLE, "x must be integer, got true"),
        (1, TRUTH, "x must be boolean, got 1"),
        ("NaN", NUMBER, 'x must be number, got "NaN"'),  # agentscope-ai/agentscope#2222
        (float("inf"), NUMBER, "x must be number, got Infinity"),
        ("turbo", MODE, 'x must be one of "fast", "slow", got "turbo"'),  # openonion/connectonion#373
        (True, {"type": "integer", "enum": [1]}, "x must be one of 1, got true"),
        ([1, "a"], LISTED, 'x[1] must be integer, got "a"'),
        ({"a": "b"}, {"type": "object", "additionalProperties": WHOLE}, "x['a'] must be integer, got \"b\""),
        ({}, {"type": "object", "required": ["a"]}, "x must be an object with 'a', got {}"),
        (3, {"anyOf": [LISTED, TEXT]}, "x must be array or string, got 3"),
        (2.5, EITHER, "x must be integer or string, got 2.5"),
        (None, TEXT, "x must be string, got null"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_told(value, schema, because):
    assert read_arguments(function(schema), ToolCall("f", {"x": value})) == ({}, because)


def test_an_empty_tag_leaves_out_what_may_be_left_out():
    """sgl-project/sglang#36835; a text may be empty, and what is required is asked for."""
    bare = ToolCall("f", {"x": ""}, is_bare=True)
    assert read_arguments(function(WHOLE, required=()), bare) == ({}, None)
    assert read_arguments(function(TEXT, required=()), bare) == ({"x": ""}, None)
    assert read_arguments(function(WHOLE), bare)[1] == 'x must be integer, got ""'


def test_a_tool_without_a_schema_has_no_arguments():
    assert read_arguments({"name": "f"}, ToolCall("f", {})) == ({}, None)
    assert read_arguments({"name": "f"}, ToolCall("f", {"x": 1}))[1] == "f has no argument 'x'; its arguments are none"


def test_whoever_checks_arguments_himself_gets_bare_ones_with_types():
    """verifiers calls its tools itself: 2 and 3 are to be added, not written one behind the other."""
    described = [function(WHOLE)]
    assert as_described(ToolCall("f", {"x": "2"}, is_bare=True), described) == {"x": 2}
    assert as_described(ToolCall("f", {"x": "no"}, is_bare=True), described) == {"x": "no"}
    assert as_described(ToolCall("f", {"x": "2"}), described) == {"x": "2"}
    assert as_described(ToolCall("g", {"x": "2"}, is_bare=True), described) == {"x": "2"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OF_TYPE = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


@given(JSON, st.sampled_from(sorted(OF_TYPE)), st.booleans())
def test_a_tool_never_gets_what_is_not_due(value, name, is_bare):
    """Whatever is written: the type that is due or a refusal, and what is right already stays as it is."""
    given_value = (value if isinstance(value, str) else json.dumps(value)) if is_bare else value
    found, wrong = read_arguments(function({"type": name}), ToolCall("f", {"x": given_value}, is_bare))
    is_right = isinstance(value, OF_TYPE[name]) and (name == "boolean" or not isinstance(value, bool))
    if wrong is None:
        assert isinstance(found["x"], OF_TYPE[name])
        assert name == "boolean" or not isinstance(found["x"], bool)
    assert not is_right or found["x"] == (given_value if name == "string" else value)
