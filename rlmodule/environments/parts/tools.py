"""Tools of an environment: Python functions, described to the policy by JSON schemas and run in child processes.

The children are those that reward functions run in (``core/sandbox/``): a call that takes too long, crashes or needs
too much memory is ended, and the policy reads an error in place of a result. Leaves out how a policy writes calls
(``tool_calls.py``).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

from transformers.utils.chat_template_utils import get_json_schema

from rlmodule.core.config import at_least, more_than
from rlmodule.core.errors import ConfigError
from rlmodule.core.sandbox.pool import LoadError, Outcome, Pool
from rlmodule.environments.parts.arguments import Schema, read_arguments
from rlmodule.environments.parts.tool_calls import MalformedCall, ToolCall


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
        path: ``file.py:function`` or ``package.module:function``, what children import.
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
            _check_signature(function)
            schema = get_json_schema(function)
            file = inspect.getsourcefile(function)
        except Exception as error:  # of the function's own types, too
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
        return cls(schema, f"{_what_children_import(function.__module__, file)}:{name}")

    @property
    def name(self) -> str:
        """What the policy calls it."""
        return str(self.schema["function"]["name"])


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
        names = [tool.name for tool in self.tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                key="environment",
                got=twice,
                because="two of its tools have this name, and a call says no more than the name",
                fix="Rename one of the functions",
            )

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
            return self._error(f"there is no tool {call.name!r:.80}; there are {', '.join(self._by_name) or 'none'}")
        arguments, wrong = read_arguments(tool.schema["function"], call)
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
            return self._error(what_went_wrong(outcome.fault))
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


def _check_signature(function: Callable[..., Any]) -> None:
    """Refuse a function that calls could not give their arguments as they are: by name, as JSON knows them.

    Raises:
        TypeError: names the argument.
    """
    if inspect.ismethod(function) and not isinstance(function.__self__, type):
        raise TypeError("it is a method of an object, which the processes that call it do not have")
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"a call gives arguments by name, and {name} has none")
        if name not in hints:
            raise TypeError(f"{name} has no type")
        if _has_enum(hints[name]):
            raise TypeError(f"{name} is an Enum, and calls give its values as texts or numbers; use typing.Literal")


def _has_enum(hint: Any) -> bool:
    return (isinstance(hint, type) and issubclass(hint, Enum)) or any(map(_has_enum, get_args(hint)))


def _what_children_import(module: str, file: str) -> str:
    """The file, which brings no package along; the module where the file imports others of its package by dots."""
    tree = ast.parse(Path(file).read_bytes())
    is_relative = any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
    return module if is_relative else os.path.abspath(file)


def what_went_wrong(fault: str) -> str:
    """The error of a traceback, all of its lines; another fault as it is."""
    lines = fault.strip().rpartition("Traceback (most recent call last):\n")[2].splitlines()
    said = list(itertools.dropwhile(lambda line: line.startswith((" ", "+", "...")), lines))
    # An ExceptionGroup is drawn as a tree: what stands last in it is an error of the group.
    return "\n".join(said) or next((text for line in reversed(lines) if (text := line.strip(" |+-"))), fault)
