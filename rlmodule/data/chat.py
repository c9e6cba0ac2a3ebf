"""Chat template -> token ids and the mask of what is trained.

The text of a conversation is what the template writes of the whole of it. Assistant turns are trained, the token that
ends each included; what comes between (user and tool turns, the next role header) is not. Leaves out where turns are in
the text (``rendering.py``), and rollouts, whose ids are kept as sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property, partial
from inspect import signature
from itertools import product
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import ConfigError, DataError, in_one_line
from rlmodule.data.control_tokens import ControlTokens
from rlmodule.data.messages import (
    ChatError,
    Message,
    Tools,
    Turns,
    as_turns,
    check_messages,
    check_tool_calls,
    described,
    is_assistant,
    prompt_text,
    with_arguments_as_mappings,
    with_arguments_as_texts,
)
from rlmodule.data.rendering import MARK, Span, lost, render_conversation
from rlmodule.data.template_day import on_day
from rlmodule.data.tokens import Ids, Segment, encode, encode_behind, encode_spans, join, special_prefix

__all__ = [
    "ChatError",
    "ChatFormat",
    "Message",
    "Segment",
    "Tools",
    "Turns",
    "as_turns",
    "check_messages",
    "described",
    "join",
    "prompt_text",
]

_OPENING: tuple[Message, ...] = ({"role": "user", "content": "x"},)
# What rendering is told here, and what it is not to be told: another template, or that it encodes and cuts.
_OF_TEMPLATES = ("self", "documents", "kwargs")
OWN_ARGUMENTS = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {*_OF_TEMPLATES}
_TOOL_NAME = "\u241ename of a tool\u241e"  # a text that no template changes or writes by itself
_A_TOOL: Tools = (
    {
        "type": "function",
        "function": {"name": _TOOL_NAME, "description": "x", "parameters": {"type": "object", "properties": {}}},
    },
)


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become tokens.

    Args:
        tokenizer: with a chat template unless ``template`` is False.
        template: False takes prompts as raw text.
        arguments: more variables for the template, e.g. ``{"enable_thinking": False}``; none of ``OWN_ARGUMENTS``.
        system_prompt: opens conversations that have no system turn; empty: none is added.
        day: that templates write as today; None: the clock's.
    """

    tokenizer: PreTrainedTokenizerBase
    template: bool = True
    arguments: Mapping[str, Any] | None = None
    system_prompt: str = ""
    day: date | None = None

    def __post_init__(self) -> None:
        if self.template and not self.tokenizer.chat_template:
            raise ConfigError(
                key="data.apply_chat_template",
                got=True,
                because="the tokenizer has no chat template",
                fix="Use data.apply_chat_template=false for prompts as raw text, or a model with a template",
            )

    def error_of(self, error: ChatError, location: str) -> ConfigError | DataError:
        """The error for a row that cannot be put into tokens: of the row, or of a template that takes none at all."""
        try:
            if self.template:
                self._render(_OPENING, asks_for_answer=True)
        except ChatError as any_row:
            return ConfigError(
                key="data.apply_chat_template",
                got=True,
                because=f"the tokenizer's chat template takes no conversation at all ({any_row})",
                fix="Correct chat_template.jinja (or chat_template in tokenizer_config.json) in the model's folder, or "
                "data.chat_template_args",
            )
        return DataError(location=location, because=str(error), fix="Fix or delete the row")

    def encode_prompts(self, prompts: Sequence[Turns], tools: Sequence[Tools | None] = ()) -> list[Ids]:
        """Token ids of each prompt, the generation prompt included.

        Raw text gets the special tokens that the tokenizer puts in front, and none behind.

        Args:
            prompts: a text or turns each.
            tools: those of each prompt; empty where none has any.

        Raises:
            ChatError: a prompt does not fit the template.
        """
        if not self.template:
            return [(*self._raw_prefix, *ids) for ids in encode(self.tokenizer, [_raw_text(p) for p in prompts])]
        if any(tools):
            each = [self._prompt_texts([p], t) for p, t in zip(prompts, tools, strict=True)]
            return encode(self.tokenizer, [text for [text] in each])
        return encode(self.tokenizer, self._prompt_texts(prompts, None))

    def encode_conversation(
        self, messages: Sequence[Message], *, num_context: int = 0, tools: Tools | None = None
    ) -> list[Segment]:
        """Segments of a conversation: the prompt, then by turns what is trained and what is not.

        Args:
            messages: the last one is the assistant's.
            num_context: messages at the beginning of which nothing is trained.
            tools: that the assistant may call.

        Raises:
            ChatError: no assistant turn, something follows the last one, or the template cannot express it.
        """
        if not messages or is_assistant(messages[0]) or not is_assistant(messages[-1]):
            raise ChatError("the conversation must begin with a prompt and end with an assistant turn")
        if not self.template:
            raise ChatError(_NEEDS_TEMPLATE)
        opened = self._with_system_prompt(messages)
        settled = self._settled(opened, tools)
        rendering = render_conversation(
            partial(self._render, tools=tools), settled, num_context + len(opened) - len(messages), self._added_tokens
        )
        check_all_said(settled, rendering.text)
        return encode_spans(self.tokenizer, rendering.text, rendering.trained)

    def encode_demonstration(self, prompt: Turns, response: str, tools: Tools | None = None) -> list[Segment]:
        """Two segments: the prompt, and the response with the token that ends it.

        Raises:
            ChatError: the prompt does not fit the template.
        """
        if self.template:
            turns = self._turns(prompt)
            shown = [*turns, {"role": "assistant", "content": response}]
            return self.encode_conversation(shown, num_context=len(turns), tools=tools)
        if not self.end_tokens():
            raise ChatError("the tokenizer has no end-of-sequence token, so a response cannot be ended")
        end = self.end_tokens()[0]
        start = len(_raw_text(prompt))
        text = _raw_text(prompt) + response
        head, *tail = encode_spans(self.tokenizer, text, [Span(start, len(text))])
        ids = [token for segment in tail for token in segment.ids]
        return [Segment((*self._raw_prefix, *head.ids), sampled=False), Segment((*ids, end), sampled=True)]

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template writes the tools that are passed to it."""
        try:
            return self.template and _TOOL_NAME in self._render(_OPENING, tools=_A_TOOL)
        except ChatError:
            return False

    @cached_property
    def _raw_prefix(self) -> Ids:
        return special_prefix(self.tokenizer)

    @cached_property
    def _added_tokens(self) -> re.Pattern[str]:
        tokens = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        tokens |= set(self.tokenizer.all_special_tokens)
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelled_token(self, prompt: Turns) -> str | None:
        """The beginning of the first special token that a prompt spells, and that is read as text; None without one."""
        if not self.template:
            return None
        return next(filter(None, map(self._control.first_in, as_turns(prompt))), None)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    def _prompt_texts(self, prompts: Sequence[Turns], tools: Tools | None) -> list[str]:
        settled = [self._settled(self._turns(prompt), tools) for prompt in prompts]
        texts = self._render_all(settled, True, tools)
        for messages, text in zip(settled, texts, strict=True):
            check_all_said(messages, text)
        return texts

    def encode_observation(self, messages: Sequence[Message], after: int) -> tuple[int, ...]:
        """Token ids that follow an assistant turn, up to where the assistant speaks again; ``messages`` lie between.

        Nothing that was sampled is encoded again: the ids are appended to those of the episode so far. What they are is
        found by comparing what the template writes of a conversation with what it writes of the longer one. Of tokens
        that steer a conversation they hold those that the template writes, and none that a message spells.

        Args:
            messages: what the environment says, of any role but the assistant's.
            after: last token of the assistant turn; where that is not the template's own end, the end comes first.

        Raises:
            ChatError: there is no template, it refuses the messages, or no conversation is continued by appending.
        """
        if not self.template:
            raise ChatError("messages need a chat template, and data.apply_chat_template is false")
        messages = [self._control.cut_in_observation(message) for message in messages]
        try:
            text = self._text_after({"role": "assistant", "content": MARK}, messages)
        except ChatError as error:
            if not any("tool_call_id" in message for message in messages):
                raise
            try:
                text = self._text_after_calls(messages)
            except ChatError as after_calls:
                raise ChatError(f"{error}; after an assistant turn with tool calls: {after_calls}") from None
        [ids] = encode_behind(self.tokenizer, [text])
        return ids[1:] if ids[:1] == (after,) else ids

    def _text_after(self, spoken: Message, messages: Sequence[Message]) -> str:
        """What the template writes behind the mark in an assistant turn when ``messages`` follow it."""
        asked = self._render(_OPENING, asks_for_answer=True)
        before, found, behind = self._render([*_OPENING, spoken, *messages], asks_for_answer=True).rpartition(MARK)
        if not found or not before.startswith(_EMPTY_THOUGHT.sub("", asked)):
            raise ChatError("the chat template writes an assistant turn otherwise once another turn follows it")
        check_something_said(messages, behind)
        return behind

    def _text_after_calls(self, messages: Sequence[Message]) -> str:
        """The same for templates that let results follow calls alone: the end of such a turn, and what follows."""
        calls = [
            {"id": message["tool_call_id"], "type": "function", "function": {"name": MARK, "arguments": {}}}
            for message in messages
            if "tool_call_id" in message
        ]
        end, last = self.end_of_turn(), ChatError("the chat template refuses tool calls")
        for form in _forms([{"role": "assistant", "tool_calls": calls}]):
            try:
                _, token, behind = self._text_after(form[0], messages).partition(self._spelled(end))
            except ChatError as error:
                last = error
                continue
            if token:
                return token + behind
            last = ChatError("the chat template puts no token after an assistant turn")
        raise last

    def _spelled(self, token: int | None) -> str:
        """A token as templates write it; what no text holds for None."""
        return MARK if token is None else str(self.tokenizer.convert_ids_to_tokens(token))

    def end_of_turn(self) -> int | None:
        """The token with which the template ends an assistant turn that nothing follows; None where it puts none."""
        if not self.template:
            return None
        try:
            whole = self._render([*_OPENING, {"role": "assistant", "content": MARK}])
        except ChatError:
            return None  # a template for prompts alone
        words = whole.partition(MARK)[2].split()
        [ids] = encode(self.tokenizer, [*words, ""][:1])
        # The first piece of a word such as "###" that takes several tokens ends nothing by itself.
        is_whole = len(ids) == 1 or (len(ids) > 1 and ids[0] in self.tokenizer.added_tokens_decoder)
        return ids[0] if is_whole and ids[0] != self.tokenizer.unk_token_id else None

    def end_tokens(self) -> tuple[int, ...]:
        """What ends a response as far as template and tokenizer say; the first ends a response given as text."""
        found = (self.end_of_turn(), self.tokenizer.eos_token_id)
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def _turns(self, prompt: Turns) -> Sequence[Message]:
        turns = as_turns(prompt)
        if is_assistant(turns[-1]):
            raise ChatError("a prompt must not end with an assistant turn, there would be nothing left to answer")
        return self._with_system_prompt(turns)

    def _with_system_prompt(self, turns: Sequence[Message]) -> Sequence[Message]:
        if not self.system_prompt or turns[0]["role"] == "system":
            return turns
        return [{"role": "system", "content": self.system_prompt}, *turns]

    def _settled(self, messages: Sequence[Message], tools: Tools | None) -> Sequence[Message]:
        """The messages in a form that the template accepts.

        Templates differ in what they want of a turn with tool calls: arguments as a mapping or as JSON text; no
        content, null or the empty text where it has none. All turns get the first form that the template accepts.

        Raises:
            ChatError: the template accepts none.
        """
        if not any(message.get("tool_calls") for message in messages):
            return messages
        errors = []
        for form in _forms(messages):
            try:
                check_tool_calls(form, self._render(form, tools=tools))
            except ChatError as error:
                errors.append(error)
            else:
                return form
        raise errors[-1]

    def _render(self, messages: Sequence[Message], asks_for_answer: bool = False, tools: Tools | None = None) -> str:
        [text] = self._render_all([messages], asks_for_answer, tools)
        return text

    def _render_all(
        self, conversations: Sequence[Sequence[Message]], asks_for_answer: bool, tools: Tools | None = None
    ) -> list[str]:
        """What the template writes of each conversation, all with the same tools; one call costs less than many."""
        try:
            texts: Any = self.tokenizer.apply_chat_template(
                [[dict(self._control.cut_in(message)) for message in messages] for messages in conversations],
                tools=None if tools is None else [dict(self._control.cut_in_description(tool)) for tool in tools],
                chat_template=self._text_of_template(tools),
                tokenize=False,
                add_generation_prompt=asks_for_answer,
                **(self.arguments or {}),
            )
        except TemplateError as error:
            raise ChatError(f"the chat template refuses it: {error}") from error
        except Exception as error:  # templates are programs: they add strings to numbers, and divide
            raise ChatError(f"the chat template refuses it: {in_one_line(error)}") from error
        assert isinstance(texts, list)
        return texts

    def _text_of_template(self, tools: Tools | None) -> str:
        """A tokenizer may have several by name, one of them for tools."""
        text = self.tokenizer.get_chat_template(tools=None if tools is None else list(map(dict, tools)))
        return text if self.day is None else on_day(text, self.day)


# What a generation prompt ends with where thinking is off; turns that others follow are written without it.
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*$")
_NEEDS_TEMPLATE = "a list of turns needs a chat template, and data.apply_chat_template is false"
_OWN_COLUMN = "; a system column, which makes turns of a text, is left out by data.system_key=null"


def check_all_said(messages: Sequence[Message], text: str) -> None:
    """Refuse a text in which words of a system or user turn are missing: templates skip roles that they do not know.

    Raises:
        ChatError: names the turn.
    """
    for number, message in enumerate(messages, start=1):
        content, role = str(message.get("content") or "").strip(), message["role"]
        if role not in ("assistant", "tool") and content not in text and lost(content, text):
            raise ChatError(f"the chat template leaves out turn {number}, of role {role!r}: {described(content)}")


def check_something_said(messages: Sequence[Message], text: str) -> None:
    """The same for messages of any role, whose words a template may write as JSON: one of them is there at least.

    Raises:
        ChatError: names the role.
    """
    for message in messages:
        content, role = message.get("content"), message["role"]
        words = re.findall(r"\w+", content) if isinstance(content, str) else ()
        if words and not any(word in text for word in words):
            raise ChatError(f"the chat template leaves out what the role {role!r} says: {described(content)}")


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    no_content: tuple[Message, ...] = ({}, {"content": None}, {"content": ""})
    for arguments, content in product((with_arguments_as_mappings, with_arguments_as_texts), no_content):
        yield [
            arguments(message) if _has_content(message) else _filled(arguments(message), content)
            for message in messages
        ]


def _has_content(message: Message) -> bool:
    return message.get("content") is not None or not message.get("tool_calls")


def _filled(message: Message, content: Message) -> Message:
    return {**{name: value for name, value in message.items() if name != "content"}, **content}


def _raw_text(prompt: Turns) -> str:
    if not isinstance(prompt, str):
        is_made = prompt[0]["role"] == "system"
        raise ChatError(f"{_NEEDS_TEMPLATE}{_OWN_COLUMN if is_made else ''}")
    return prompt
