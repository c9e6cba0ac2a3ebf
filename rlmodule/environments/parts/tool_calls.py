"""Tool calls in what a policy says: what a format has to read and write, and which format a chat template speaks.

Leaves out the formats (``formats/``) and running what is called (``tools.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

from rlmodule.core.episodes import Completion
from rlmodule.core.errors import ConfigError
from rlmodule.core.registry import Registry

AUTO = "auto"
# Whose marks are looked for in a template first: some templates have the marks of two formats.
BY_TEMPLATE = ("qwen_xml", "hermes", "mistral", "deepseek", "pythonic", "llama_json")
WITHOUT_TEMPLATE = "pythonic"  # the shortest, for models that have learned none
WRITES_CALLS = "tool_calls"  # a template with this word writes calls in some form
OTHER_MARKS = ("<arg_key>",)  # of forms that no format reads, and which share marks with one that reads another (GLM)
THOUGHT = {"<think>": "</think>"}  # what begins one, and what ends it
BESIDE_ARGUMENTS = frozenset({"name", "id", "type"})  # what a call may have beside its arguments


@dataclass(frozen=True)
class ToolCall:
    """A function called by name with named arguments.

    Args:
        name, arguments: what is called, and with what.
        is_bare: arguments are texts without types, which the schema of the tool has to say.
    """

    name: str
    arguments: Mapping[str, Any]
    is_bare: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class MalformedCall:
    """What looks like a call and is none; ``because`` says what is wrong with it, for the policy to read."""

    because: str


class ToolFormat(Protocol):
    """How models of some family write calls.

    ``marks``: each text with which a chat template of the family shows that it speaks this format.
    """

    marks: ClassVar[tuple[str, ...]]

    def calls(self, completion: Completion) -> list[ToolCall | MalformedCall]:
        """The calls of a response in order; none in one that answers."""

    def written(self, call: ToolCall) -> str:
        """A response that is this one call, without the token that ends it."""


Call = ToolCall | MalformedCall
TOOL_FORMATS: Registry[ToolFormat] = Registry("tool format", "rlmodule.environments.parts.formats")


def format_for(template: str, name: str = AUTO) -> ToolFormat:
    """The format called ``name``; for ``auto`` that of the chat template.

    Raises:
        ConfigError: no format has that name, or none reads what the template writes.
    """
    if name == AUTO:
        spoken = (known for known in BY_TEMPLATE if any(mark in template for mark in TOOL_FORMATS.get(known).marks))
        found = None if any(mark in template for mark in OTHER_MARKS) else next(spoken, None)
        if found is None and WRITES_CALLS in template:
            raise ConfigError(
                key="environment.tool_format",
                got=AUTO,
                because="the chat template writes tool calls in a form that none of the formats reads",
                fix=f"Use a model of another family, or one of {', '.join(TOOL_FORMATS.names())}, which this model "
                "would have to learn",
            )
        name = found or WITHOUT_TEMPLATE
    return TOOL_FORMATS.get(name, "environment.tool_format")()


def calls_in(
    text: str,
    opens: str,
    closes: str,
    read: Callable[[str, int], tuple[Sequence[Call], int]],
    thoughts: Mapping[str, str] = THOUGHT,
) -> list[Call]:
    """The calls of a response that are not only thought of, in order.

    A thought may have begun in the prompt, and one that is not ended holds the rest. What a whole call has in its
    arguments is no mark; behind a mark that begins no whole call, as thoughts mention them, the search goes on.

    Args:
        text: the response.
        opens, closes: what a call begins and ends with; empty where it ends with its arguments.
        read: text, where ``opens`` ends -> what is called there, and where that ends; of what is malformed, ``opens``.
            May raise what ``decode_json`` does.
        thoughts: what begins a thought -> what ends it.
    """
    marks = re.compile("|".join(map(re.escape, (opens, *thoughts, *thoughts.values()))))
    found, place, last = list[Call](), 0, text.rfind(closes)
    while mark := marks.search(text, place):
        place = mark.end()
        if mark[0] == opens and place > last:
            found.append(MalformedCall(f"a {opens} is not closed by {closes}"))
        elif mark[0] == opens:
            try:
                calls, place = read(text, place)
            except (ValueError, RecursionError) as error:
                calls = [not_json(error)]
            found += calls
        elif mark[0] in thoughts:
            end = text.find(thoughts[mark[0]], place)
            if end < 0:
                break
            place = end + len(thoughts[mark[0]])
        else:  # everything so far was a thought
            found.clear()
    return found


def behind_thought(text: str, call: re.Pattern[str]) -> str:
    """What a response says once it has thought, where it is a call as a whole or none.

    Args:
        text: the response.
        call: matches what a call begins with; what a call has in its arguments is no mark of a thought.
    """
    while not call.match(text := text.lstrip()):
        thought, mark, behind = text.partition("</think>")
        before, opened, _ = thought.partition("<think>")
        if opened and (before or not mark):
            return before  # something was said, or the thought is not ended
        if not mark:
            break
        text = behind
    return text


def decode_json(text: str, start: int = 0) -> tuple[Any, int]:
    """(the JSON value that begins at ``start``, where it ends).

    Raises:
        ValueError, RecursionError: there is none; NaN and Infinity are Python's own.
    """
    begin = _SPACE.match(text, start)
    assert begin is not None, "no space is space as well"
    return _JSON.raw_decode(text, begin.end())


def parse_json(text: str) -> Any:
    """The JSON value that is all of ``text``.

    Raises:
        ValueError, RecursionError: it is none.
    """
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_JSON = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = re.compile(r"\s*")


def read_call(value: Any, arguments_key: str = "arguments") -> Call:
    """A call out of JSON: a mapping with ``name`` and arguments, which may be JSON text once more, or empty."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return MalformedCall('a call is a JSON object with "name" and "' + arguments_key + '"')
    if arguments_key not in value and set(value) - BESIDE_ARGUMENTS:
        return MalformedCall(f'the arguments of a call are under "{arguments_key}"')
    arguments = value.get(arguments_key)
    if isinstance(arguments, str) and arguments.strip():
        with suppress(ValueError, RecursionError):
            arguments = parse_json(arguments)
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, Mapping):
        return MalformedCall(f'"{arguments_key}" of a call is a JSON object')
    return ToolCall(value["name"], arguments)


def not_json(error: Exception) -> MalformedCall:
    """The call for text that is no JSON."""
    return MalformedCall(f"the call is not valid JSON: {error}")
