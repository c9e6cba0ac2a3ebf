"""Tools of an environment: Python functions, described to the policy by JSON schemas and run in child processes.

The children are those that reward functions run in (``core/sandbox/``): a call that takes too long, crashes or needs
too much memory is ended, and the policy reads an error in place of a result. Leaves out how a policy writes calls
(``tool_calls.py``).
"""

from __future__ import annotations

import inspect
import json
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from rlmodule.core.config import at_least, more_than
from rlmodule.core.errors import ConfigError
from rlmodule.core.sandbox.pool import LoadError, Outcome, Pool
from rlmodule.environments.parts.tool_calls import MalformedCall, ToolCall

Schema = Mapping[str, Any]
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


@dataclass(frozen=True)
class ToolLimits:
    """What a call may use.

    Args:
        seconds: of wall clock.
        memory_mb: MiB of address space beyond what importing the function takes.
        characters: of a result; the rest is left out.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    characters: int = 2000

    def __post_init__(self) -> None:
        more_than("tool_seconds", self.seconds, 0)
        at_least("tool_memory_mb", self.memory_mb, 16)
        at_least("tool_characters", self.characters, 1)


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call.

    Args:
        schema: its description for chat templates.
        path: ``file.py:function``, what children import.
        settings: arguments that the policy neither sees nor gives.
        seconds: that a call may take, for a tool that has limits of its own; None for those of the environment, which
            are on memory as well.
    """

    schema: Schema
    path: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """A function of a module; signature and docstring (with ``Args:``) become its schema.

        Raises:
            ConfigError: types or docstring do not describe it, or children could not import it.
        """
        name = getattr(function, "__qualname__", repr(function))
        try:
            schema = get_json_schema(function)
            file = inspect.getsourcefile(function)
        except (DocstringParsingException, TypeHintParsingException, TypeError) as error:
            raise ConfigError(
                key="environment",
                got=name,
                because=f"the tool cannot be described: {error}",
                fix="Give every argument a type and a line under Args: in the docstring",
            ) from None
        if file is None or not os.path.isfile(file) or "<" in name:
            raise ConfigError(
                key="environment",
                got=name,
                because="a tool runs in processes of its own, which import it from its file",
                fix="Define it with def at the top of a module",
            )
        return cls(schema, f"{os.path.abspath(file)}:{name}")

    @property
    def name(self) -> str:
        """What the policy calls it."""
        return str(self.schema["function"]["name"])

    def read_arguments(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
        """(arguments with the types of the schema, what is wrong with them or None)."""
        parameters = self.schema["function"].get("parameters", {})
        known: Mapping[str, Schema] = parameters.get("properties", {})
        unknown = [name for name in given if name not in known]
        missing = [name for name in parameters.get("required", ()) if name not in given]
        if unknown or missing:
            wrong = f"has no argument {unknown[0]!r}" if unknown else f"needs the argument {missing[0]!r}"
            return {}, f"{self.name} {wrong}; its arguments are {', '.join(known) or 'none'}"
        read = {name: _typed(value, known[name]) for name, value in given.items()}
        for name, value in read.items():
            if not _fits(value, known[name]):
                return {}, f"{name} must be {known[name].get('type')}, got {json.dumps(value, default=str)[:80]}"
        return read, None


@dataclass(frozen=True)
class ToolResult:
    """What the policy reads after a call."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, eq=False)
class Toolbox:
    """Tools that can be called from several threads at a time.

    Args:
        tools: each with a name of its own.
        limits: of each call.
    """

    tools: Sequence[Tool]
    limits: ToolLimits = field(default_factory=ToolLimits)

    def __post_init__(self) -> None:
        assert len(self._by_name) == len(self.tools), "two tools have the same name"

    @property
    def schemas(self) -> list[Schema]:
        """What the chat template is given."""
        return [tool.schema for tool in self.tools]

    def name_of(self, call: ToolCall | MalformedCall) -> str:
        """Of the tool that is called; ``unknown`` where there is none, whatever the policy calls it."""
        name = getattr(call, "name", "")
        return name if name in self._by_name else "unknown"

    def run(self, call: ToolCall | MalformedCall) -> ToolResult:
        """The result of a call; an error where there is no such tool, arguments are wrong, or the tool fails."""
        if isinstance(call, MalformedCall):
            return self._error(call.because)
        tool = self._by_name.get(call.name)
        if tool is None:
            return self._error(f"there is no tool {call.name!r:.80}; there are {', '.join(self._by_name)}")
        arguments, wrong = tool.read_arguments(call.arguments)
        if wrong is not None:
            return self._error(wrong)
        with self._pool_of(tool) as pool:
            [outcome] = pool.map([{**arguments, **tool.settings}])
        return self._result(outcome)

    @cached_property
    def _by_name(self) -> dict[str, Tool]:
        return {tool.name: tool for tool in self.tools}

    @cached_property
    def _free(self) -> dict[str, queue.LifoQueue[Pool]]:
        """Pools of one child that wait for a call, by tool."""
        return {name: queue.LifoQueue() for name in self._by_name}

    @contextmanager
    def _pool_of(self, tool: Tool) -> Iterator[Pool]:
        """A pool for one call: its calls take turns, so each thread has one of its own."""
        free = self._free[tool.name]
        try:
            pool = free.get_nowait()
        except queue.Empty:
            pool = self._new_pool(tool)
        try:
            yield pool
        finally:
            free.put(pool)

    def _new_pool(self, tool: Tool) -> Pool:
        try:
            if tool.seconds is not None:
                return Pool(tool.path, 1, tool.seconds)
            return Pool(tool.path, 1, self.limits.seconds, memory=self.limits.memory_mb << 20)
        except LoadError as error:
            raise ConfigError(
                key="environment", got=tool.path, because="the tool cannot be imported", fix=f"Its own words:\n{error}"
            ) from None

    def _result(self, outcome: Outcome) -> ToolResult:
        if outcome.fault is not None:
            last = outcome.fault.strip().splitlines()[-1]  # of a traceback: what went wrong
            return self._error(last)
        value = outcome.result
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except RecursionError:
            return self._error("the result is nested too deeply")
        return ToolResult(self._shortened(text))

    def _error(self, text: str) -> ToolResult:
        return ToolResult(self._shortened(f"error: {text}"), is_error=True)

    def _shortened(self, text: str) -> str:
        limit = self.limits.characters
        text = text.encode("utf-8", errors="replace").decode()  # half of a surrogate pair is no token
        return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more characters)"


def _typed(value: Any, schema: Schema) -> Any:
    """A text where no text is due, as formats without types write it: read as JSON."""
    if not isinstance(value, str) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _fits(value: Any, schema: Schema) -> bool:
    due = schema.get("type")
    types = _TYPES.get(due) if isinstance(due, str) else None  # unions and what JSON schema has beside are let through
    if types is None or (value is None and schema.get("nullable")):
        return True
    return isinstance(value, types) and (due == "boolean" or not isinstance(value, bool))
