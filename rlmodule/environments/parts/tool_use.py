"""Environments in which the policy may call tools before it answers: a response without a call is the answer.

Leaves out the tools (``tools.py``), how calls are written (``tool_calls.py``) and which problems there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from rlmodule.core.config import one_of
from rlmodule.core.episodes import LENGTH, Completion, Done, Message, Observation
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.environments.parts.tool_calls import (
    AUTO,
    TOOL_FORMATS,
    MalformedCall,
    ToolCall,
    ToolFormat,
    format_for,
)
from rlmodule.environments.parts.tools import Tool, Toolbox, ToolLimits

OBSERVATION_ROLES = ("tool", "user")
MAX_CALLS = 32  # of one response that are made
Self = TypeVar("Self", bound="ToolEnvironment")


@dataclass(frozen=True)
class ToolEnvironment(ABC):
    """Rows with an answer, and tools to find it with. A subclass says which tools, and what an answer is worth."""

    tool_format: str = AUTO  # how calls are written: hermes, qwen_xml, llama_json, pythonic, mistral, deepseek; or auto
    tool_seconds: float = 5.0  # that a call may take
    tool_memory_mb: int = 512  # MiB that a call may use
    tool_characters: int = 2000  # of a result that are shown
    observation_role: str = "tool"  # role of results; user for chat templates that know no tools

    has_many_answers: ClassVar[bool] = False
    gives_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("tool_format", self.tool_format, (AUTO, *TOOL_FORMATS.names()))
        one_of("observation_role", self.observation_role, OBSERVATION_ROLES)
        _ = self._limits  # checks them

    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """What the policy may call."""

    @abstractmethod
    def score(self, row: Prompt, answer: str) -> RewardResult | None:
        """The reward of an answer; None where the run's reward function gives it, and ``gives_rewards`` is False."""

    def start(self, row: Prompt) -> ToolEpisode:
        """A new episode about ``row``."""
        return ToolEpisode(self, row)

    def for_template(self: Self, template: str) -> Self:
        """The same with the format that the chat template speaks."""
        if self.tool_format != AUTO:
            return self
        made = type(format_for(template))
        return replace(self, tool_format=made.__module__.rsplit(".", 1)[-1])

    def with_tools(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows, each with the description of the tools for the chat template."""
        schemas = self.toolbox.schemas
        return [{**row, "tools": schemas} for row in rows]

    def results(self, calls: Sequence[ToolCall | MalformedCall], before: int = 0) -> tuple[list[Message], int]:
        """(messages with what the calls give, in order, how many calls are errors); calls beyond MAX_CALLS are one.

        Args:
            calls: of one response.
            before: calls of earlier responses in the episode, which the names of these are counted on from.
        """
        if len(calls) > MAX_CALLS:
            rest = MalformedCall(
                f"{len(calls) - MAX_CALLS} more calls were not made: a response has {MAX_CALLS} at most"
            )
            calls = [*calls[:MAX_CALLS], rest]
        results = [self.toolbox.run(call) for call in calls]
        messages: list[Message] = [
            {
                "role": self.observation_role,
                "name": self.toolbox.name_of(call),
                "tool_call_id": f"call{before + number:05d}",  # nine characters, as Mistral's templates want
                "content": result.text,
            }
            for number, (call, result) in enumerate(zip(calls, results, strict=True))
        ]
        return in_one_turn(messages), sum(result.is_error for result in results)

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools, ready to be called."""
        return Toolbox(list(self.tools()), self._limits)

    @property
    def format(self) -> ToolFormat:
        """How calls are written."""
        return format_for("", self.tool_format)

    @property
    def _limits(self) -> ToolLimits:
        return ToolLimits(self.tool_seconds, self.tool_memory_mb, self.tool_characters)


def in_one_turn(messages: Sequence[Message]) -> list[Message]:
    """The same with a user's messages in a row as one: there are chat templates that refuse two turns of one role."""
    found = list[Message]()
    for message in messages:
        if found and message["role"] == found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{message['content']}"}
        else:
            found.append(message)
    return found


@dataclass(eq=False)
class ToolEpisode:
    """One row: calls and their results, then an answer."""

    environment: ToolEnvironment
    row: Prompt
    num_calls: int = field(default=0, init=False)
    num_errors: int = field(default=0, init=False)

    @property
    def prompt(self) -> Observation:
        """The row's own prompt, which describes the tools."""
        return Observation(ids=self.row.ids)

    def reply(self, completion: Completion) -> Observation | Done:
        """The results of the calls of a response; the end where it has none, and where it was cut."""
        environment = self.environment
        calls = environment.format.calls(completion)
        if completion.finish_reason == LENGTH:
            return self.cut() if calls else self._done(environment.score(self.row, completion.text))
        if not calls:
            return self._done(environment.score(self.row, completion.text))
        messages, errors = environment.results(calls, self.num_calls)
        self.num_calls += len(calls)
        self.num_errors += errors
        return Observation(messages=messages)

    def cut(self) -> Done:
        """No answer was given, so it is worth nothing."""
        return self._done(RewardResult(0.0) if self.environment.gives_rewards else None)

    def _done(self, reward: RewardResult | None) -> Done:
        return Done(reward, {"tool_calls": float(self.num_calls), "tool_errors": float(self.num_errors)})
