"""Tool calls in what a policy says: what a format has to read and write, and which format a chat template speaks.

Leaves out the formats (``formats/``) and running what is called (``tools.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from rlmodule.core.episodes import Completion
from rlmodule.core.registry import Registry

AUTO = "auto"
# Whose marks are looked for in a template first: some templates have the marks of two formats.
BY_TEMPLATE = ("qwen_xml", "hermes", "mistral", "deepseek", "pythonic", "llama_json")
WITHOUT_TEMPLATE = "pythonic"  # the shortest, for models that have learned none
BESIDE_ARGUMENTS = frozenset({"name", "id", "type"})  # what a call may have beside its arguments


@dataclass(frozen=True)
class ToolCall:
    """A function called by name with named arguments."""

    name: str
    arguments: Mapping[str, Any]


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


TOOL_FORMATS: Registry[ToolFormat] = Registry("tool format", "rlmodule.environments.parts.formats")


def format_for(template: str, name: str = AUTO) -> ToolFormat:
    """The format called ``name``; for ``auto`` that of the chat template.

    Raises:
        ConfigError: no format has that name.
    """
    if name == AUTO:
        spoken = (known for known in BY_TEMPLATE if any(mark in template for mark in TOOL_FORMATS.get(known).marks))
        name = next(spoken, WITHOUT_TEMPLATE)
    return TOOL_FORMATS.get(name, "environment.tool_format")()


def after_reasoning(text: str, opens: str = "<tool_call>", closes: str = "</tool_call>") -> str:
    """What a response says beside its thoughts: a call that is only thought of is none.

    A thought may have begun in the prompt, and one that is not ended holds the rest. What a call between ``opens`` and
    ``closes`` has in its arguments is no mark of a thought.
    """
    marks = re.compile("|".join(map(re.escape, ("<think>", "</think>", opens, closes))))
    said, begin, inside = "", 0, ""
    for found in marks.finditer(text):
        mark = found[0]
        if mark == "</think>" and (inside != opens or text.find(closes, found.end()) < 0):
            said, begin, inside = said if inside == "<think>" else "", found.end(), ""
        elif mark == "<think>" and not inside:
            said, inside = said + text[begin : found.start()], mark
        elif mark == (opens if not inside else closes) and inside != "<think>":
            inside = "" if inside else opens
    return said if inside == "<think>" else said + text[begin:]


def read_call(value: Any, arguments_key: str = "arguments") -> ToolCall | MalformedCall:
    """A call out of JSON: a mapping with ``name`` and arguments, which may be JSON text once more."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return MalformedCall('a call is a JSON object with "name" and "' + arguments_key + '"')
    if arguments_key not in value and set(value) - BESIDE_ARGUMENTS:
        return MalformedCall(f'the arguments of a call are under "{arguments_key}"')
    arguments = value.get(arguments_key, {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return MalformedCall(f'"{arguments_key}" of a call is a JSON object')
    return ToolCall(value["name"], arguments)


def not_json(error: Exception) -> MalformedCall:
    """The call for text that is no JSON."""
    return MalformedCall(f"the call is not valid JSON: {error}")
