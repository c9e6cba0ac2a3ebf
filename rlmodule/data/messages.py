"""Conversations as data files hold them: a text, or a list of turns with role and content. Leaves out tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlmodule.data.json_text import load_json

Message = Mapping[str, Any]  # role, content, and what else the chat template knows
Turns = str | Sequence[Message]  # a text stands for one user turn
Tools = Sequence[Mapping[str, Any]]  # descriptions of functions, as JSON schemas


class ChatError(ValueError):
    """A conversation that cannot be put into tokens; the caller, who knows the row, adds its location."""


def as_turns(prompt: Turns) -> Sequence[Message]:
    """The prompt as turns; a text is one user turn."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def without_prompt(prompt: Turns, response: Turns) -> Turns:
    """The response without the prompt's own turns, where it repeats them first."""
    turns = list(as_turns(prompt))
    for own in (turns, turns[1:]):  # the system turn may stand in a column of its own
        if own and not isinstance(response, str) and list(response[: len(own)]) == own:
            return response[len(own) :]
    return response


def is_assistant(message: Message) -> bool:
    """Whether this is a turn of the assistant."""
    return message.get("role") == "assistant"


def prompt_text(prompt: Turns) -> str:
    """The prompt as a person reads it."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0].get("content") or "")
    return "\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in prompt)


def check_messages(value: object) -> None:
    """Refuse a value that is not a conversation of text turns.

    A turn with tool calls may have no content, or null, which is how OpenAI writes it.

    Raises:
        ChatError: names the turn and what is wrong with it.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ChatError(f"a prompt is a text or a list of turns, this is {described(value)}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f"turn {number} must be a mapping with a role, this is {described(message)}")
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and calls):
            known = "" if "content" in message else f"; it has {', '.join(map(str, message))}"
            raise ChatError(f"turn {number} must have a text as content, this is {described(content)}{known}")
        if calls is not None and not (isinstance(calls, list | tuple) and all(isinstance(c, Mapping) for c in calls)):
            raise ChatError(f"tool_calls of turn {number} must be a list of mappings, this is {described(calls)}")


def tool_functions(message: Message) -> Iterator[Mapping[str, Any]]:
    """The functions that a turn calls, with ``name`` and ``arguments``."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function, Mapping):
            yield function


def with_arguments_as_mappings(message: Message) -> Message:
    """The turn with the arguments of its tool calls as mappings; OpenAI writes them as JSON texts."""
    return _with_arguments(message, lambda value: _parsed(value) if isinstance(value, str) else value)


def with_arguments_as_texts(message: Message) -> Message:
    """The turn with the arguments of its tool calls as JSON texts."""
    return _with_arguments(
        message, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def check_tool_calls(messages: Sequence[Message], text: str) -> None:
    """Refuse a text without the tool calls of its messages, or with arguments as Python prints them, not as JSON.

    Raises:
        ChatError: names the tool.
    """
    for function in (function for message in messages for function in tool_functions(message)):
        name, arguments = str(function.get("name", "")), function.get("arguments")
        if name not in text:
            raise ChatError(f"the chat template does not write the call of the tool {name!r}")
        if isinstance(arguments, Mapping) and arguments and str(arguments) in text:
            raise ChatError(f"the chat template does not write the arguments of the tool {name!r} as JSON")


def read_tools(value: Any) -> Tools:
    """The tools of a row: a list of mappings, or JSON text of one, as a whole or for each tool.

    Raises:
        ChatError: it is neither.
    """
    tools = _parsed(value) if isinstance(value, str) else value
    tools = [] if tools is None else tools  # JSON's null
    tools = [tools] if isinstance(tools, Mapping) else tools
    if isinstance(tools, list | tuple):
        tools = [_parsed(tool) if isinstance(tool, str) else tool for tool in tools]
        if all(isinstance(tool, Mapping) for tool in tools):
            return tools
    raise ChatError(f"tools are a list of function descriptions, or JSON text of one; this is {described(value)}")


def described(value: object) -> str:
    """Type and value of something unexpected, for errors."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def _with_arguments(message: Message, change: Any) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if isinstance(function, Mapping) and "arguments" in function:
            changed = {**function, "arguments": change(function["arguments"])}
            call = {**call, "function": changed} if "function" in call else changed
        calls.append(call)
    return {**message, "tool_calls": calls}


def _parsed(text: str) -> Any:
    try:
        return load_json(text)
    except ValueError:
        return text
