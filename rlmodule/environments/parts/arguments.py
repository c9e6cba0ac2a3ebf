"""Arguments of a tool call against the tool's JSON schema: each gets the type that is due, or words for the policy.

A model writes ``"5"`` or ``5.0`` where 5 is due, and some formats know no types at all. What fits as it is stays as it
is; a text is read as JSON only where no text is due. Leaves out how calls are written (``tool_calls.py``).
"""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlmodule.environments.parts.tool_calls import ToolCall, parse_json

Schema = Mapping[str, Any]
_SHOWN = 80  # characters of a value
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


class _MisfitError(Exception):
    """A value is not what its schema asks for: where in the argument, and what is due there."""

    def __init__(self, value: Any, due: str, where: str = "") -> None:
        super().__init__(f"{where} must be {due}, got {json.dumps(value, default=str)[:_SHOWN]}")
        self.value, self.due, self.where = value, due, where

    def inside(self, where: str) -> _MisfitError:
        """The same, seen from the list or mapping that holds the value."""
        return _MisfitError(self.value, self.due, where + self.where)


def read_arguments(function: Schema, call: ToolCall) -> tuple[dict[str, Any], str | None]:
    """(arguments with the types of the schema, what is wrong with them or None).

    Args:
        function: description of a tool: ``name``, and ``parameters``, the schema of its arguments.
        call: of the tool.
    """
    parameters, given = function.get("parameters") or {}, call.arguments
    known: Mapping[str, Schema] = parameters.get("properties", {})
    required = parameters.get("required", ())
    unknown = [name for name in given if name not in known]
    missing = [name for name in required if name not in given]
    if unknown or missing:
        wrong = f"has no argument {unknown[0]!r}" if unknown else f"needs the argument {missing[0]!r}"
        return {}, f"{function['name']} {wrong}; its arguments are {', '.join(known) or 'none'}"
    read = _read_bare if call.is_bare else _read
    found = {}
    for name, value in given.items():
        try:
            found[name] = read(value, known[name])
        except _MisfitError as misfit:
            if call.is_bare and value == "" and name not in required:
                continue  # an empty tag: the argument is left out
            return {}, str(misfit.inside(name))
    return found, None


def as_described(call: ToolCall, functions: Sequence[Schema]) -> dict[str, Any]:
    """Arguments for somebody who checks them: of bare ones those that fit get the types of the tool's schema."""
    function = next((function for function in functions if function["name"] == call.name), None)
    if function is None or not call.is_bare:
        return dict(call.arguments)
    read, wrong = read_arguments(function, call)
    return dict(call.arguments) if wrong else read


def _read(value: Any, schema: Schema) -> Any:
    """A value with a type; texts in it are read where no text is due, and where nothing fits without."""
    with suppress(_MisfitError):
        return _fit(value, schema, _typed)
    return _fit(value, schema, _lenient)


def _read_bare(text: str, schema: Schema) -> Any:
    """A text without a type: whatever else is due that it spells, before the text itself."""
    if schema.get("type") == "string" and not schema.get("nullable"):
        return _fit(text, schema, _typed)
    says_type = not schema.keys().isdisjoint({"type", "anyOf", "oneOf", "enum"})
    for reading in _readings(text):
        if says_type or isinstance(reading, list | dict):
            with suppress(_MisfitError):
                return _read(reading, schema)
    return _fit(text, schema, _typed)


def _readings(text: str) -> Iterator[Any]:
    """What a text spells that is no text: in JSON, or as templates print Python's values."""
    for read in (parse_json, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Python that is none of ours
                value = read(text.strip())
            json.dumps(value)  # sets, bytes and complex numbers are of Python alone
            if not isinstance(value, str) and (read is parse_json or not _is_number(value)):
                yield list(value) if isinstance(value, tuple) else value


def _fit(value: Any, schema: Schema, as_type: Callable[[Any, str], Any]) -> Any:
    """The value as the schema has it.

    Args:
        value: any value of JSON.
        schema: what is due; what it says beside types, choices and their parts is let through.
        as_type: value, name of a type -> the value as that type.

    Raises:
        _MisfitError: it is not what is due.
    """
    if value is None and schema.get("nullable"):
        return None
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key, ()):
            with suppress(_MisfitError):
                return _fit(value, choice, as_type)
    if "anyOf" in schema or "oneOf" in schema:
        raise _MisfitError(value, _due(schema))
    names = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    for name in names:
        with suppress(_MisfitError):
            found = as_type(value, name)
            break
    else:
        if names:
            raise _MisfitError(value, _due(schema))
        found = value
    if "enum" in schema and not any(_is_same(found, choice) for choice in schema["enum"]):
        raise _MisfitError(value, _due(schema))
    return _with_parts(found, schema, as_type)


def _with_parts(value: Any, schema: Schema, as_type: Callable[[Any, str], Any]) -> Any:
    """The value with what it holds as the schema has it."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        first, rest = schema.get("prefixItems", ()), schema.get("items")
        return [_part(part, _at(first, rest, n), as_type, f"[{n}]") for n, part in enumerate(value)]
    if isinstance(value, Mapping):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for name in schema.get("required", ()):
            if name not in value:
                raise _MisfitError(value, f"an object with {name!r}")
        return {name: _part(part, known.get(name, rest), as_type, f"[{name!r}]") for name, part in value.items()}
    return value


def _part(value: Any, schema: Any, as_type: Callable[[Any, str], Any], where: str) -> Any:
    if not isinstance(schema, Mapping):
        return value
    try:
        return _fit(value, schema, as_type)
    except _MisfitError as misfit:
        raise misfit.inside(where) from None


def _at(first: Sequence[Any], rest: Any, number: int) -> Any:
    return first[number] if number < len(first) else rest


def _typed(value: Any, name: str) -> Any:
    """The value where it is of a type; 5.0 is an integer in JSON."""
    types = _TYPES.get(name)
    if types is None:  # a type that JSON does not have is let through
        return value
    if name == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    is_right = isinstance(value, types) and (name == "boolean" or not isinstance(value, bool))
    if not is_right or (isinstance(value, float) and not math.isfinite(value)):
        raise _MisfitError(value, name)
    return value


def _lenient(value: Any, name: str) -> Any:
    """The same, with a text read where another type is due."""
    with suppress(_MisfitError):
        return _typed(value, name)
    for reading in _readings(value) if isinstance(value, str) else ():
        with suppress(_MisfitError):
            return _typed(reading, name)
    raise _MisfitError(value, name)


def _due(schema: Schema) -> str:
    """What a schema asks for, in words."""
    choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if choices:
        return " or ".join(map(_due, choices))
    if "enum" in schema:
        return f"one of {', '.join(map(json.dumps, schema['enum']))}"
    due = schema.get("type", "something else")
    return due if isinstance(due, str) else " or ".join(due)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(value: Any, choice: Any) -> bool:
    """Whether two values are equal and of one type; 1 is not true."""
    return bool(value == choice) and isinstance(value, bool) == isinstance(choice, bool)
