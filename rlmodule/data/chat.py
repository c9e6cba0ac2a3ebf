"""Chat template -> token ids and the mask of what is trained.

A conversation is built from segments, each encoded by itself and then left alone, so the ids of a turn never depend on
what follows: a template that drops earlier reasoning cannot change them. The token that ends an assistant turn belongs
to that turn and is trained; what comes between (user and tool turns, the next role header) is not.
Leaves out rollouts, whose ids are kept as sampled and never pass through text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import ConfigError

Message = Mapping[str, Any]  # role, content, and what else the template knows
Turns = str | Sequence[Message]  # a text stands for one user turn

# A conversation to render a turn against, and a text that no template changes and no data contains.
_OPENING: tuple[Message, ...] = ({"role": "user", "content": "x"},)
_MARK = "\u241eend of content\u241e"


class ChatError(ValueError):
    """A conversation that the tokenizer's template cannot express; whoever knows the row puts its place in front."""


@dataclass(frozen=True)
class Segment:
    """A run of tokens that is trained (``sampled``) or not."""

    ids: tuple[int, ...]
    sampled: bool


def join(segments: Sequence[Segment]) -> tuple[list[int], list[bool]]:
    """Lay segments end to end: token ids, and a mask that is True on sampled tokens."""
    ids = [token for segment in segments for token in segment.ids]
    mask = [segment.sampled for segment in segments for _ in segment.ids]
    return ids, mask


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become tokens.

    Args:
        tokenizer: with a chat template unless ``template`` is False.
        template: False takes prompts as raw text.
        arguments: more variables for the template, e.g. ``{"enable_thinking": False}``.
        system_prompt: opens conversations that have no system turn; empty: none is added.
    """

    tokenizer: PreTrainedTokenizerBase
    template: bool = True
    arguments: Mapping[str, Any] | None = None
    system_prompt: str = ""

    def __post_init__(self) -> None:
        if self.template and not self.tokenizer.chat_template:
            raise ConfigError(
                key="data.apply_chat_template",
                got=True,
                because="the tokenizer has no chat template",
                fix="Use data.apply_chat_template=false for prompts as raw text, or a model with a template",
            )

    def encode_prompts(self, prompts: Sequence[Turns]) -> list[tuple[int, ...]]:
        """Token ids of each prompt, up to where the assistant begins to speak.

        Raises:
            ChatError: a prompt does not fit the template.
        """
        if self.template:
            texts = [self._render(self._turns(prompt), asks_for_answer=True) for prompt in prompts]
        else:
            texts = [_raw_text(prompt) for prompt in prompts]
        return self._encode(texts, add_special_tokens=not self.template)

    def encode_conversation(self, messages: Sequence[Message]) -> list[Segment]:
        """Segments of a conversation with assistant turns; the first is the prompt, the last ends with an assistant.

        Raises:
            ChatError: no assistant turn, something follows the last one, or the template does not mark its end.
        """
        speaks = [message.get("role") == "assistant" for message in messages]
        if not (speaks and speaks[-1]) or speaks[0]:
            raise ChatError("the conversation must begin with a prompt and end with an assistant turn")
        end = self._end_of_turn()
        texts: list[tuple[str, bool]] = []
        unsaid: list[Message] = []  # turns since the last assistant turn
        for message, is_sampled in zip(messages, speaks, strict=True):
            if is_sampled:
                lead_in = self._between(unsaid, end) if texts else self._render(self._with_system_prompt(unsaid), True)
                texts += [(lead_in, False), (self._spoken(message, end), True)]
                unsaid = []
            else:
                unsaid.append(message)
        ids = self._encode([text for text, _ in texts], add_special_tokens=False)
        return [Segment(part, is_sampled) for part, (_, is_sampled) in zip(ids, texts, strict=True)]

    def encode_demonstration(self, prompt: Turns, response: str) -> list[Segment]:
        """Two segments: the prompt, and the response with the token that ends it.

        Raises:
            ChatError: the prompt does not fit the template.
        """
        if self.template:
            return self.encode_conversation([*self._turns(prompt), {"role": "assistant", "content": response}])
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ChatError("the tokenizer has no end-of-sequence token, so a response cannot be ended")
        [prompt_ids] = self.encode_prompts([prompt])
        [response_ids] = self._encode([response], add_special_tokens=False)
        return [Segment(prompt_ids, sampled=False), Segment((*response_ids, end), sampled=True)]

    def _turns(self, prompt: Turns) -> Sequence[Message]:
        turns = as_turns(prompt)
        if turns[-1]["role"] == "assistant":
            raise ChatError("a prompt must not end with an assistant turn, there would be nothing left to say")
        return self._with_system_prompt(turns)

    def _with_system_prompt(self, turns: Sequence[Message]) -> Sequence[Message]:
        if not self.system_prompt or turns[0]["role"] == "system":
            return turns
        return [{"role": "system", "content": self.system_prompt}, *turns]

    def _end_of_turn(self) -> str:
        whole = self._render([*_OPENING, {"role": "assistant", "content": _MARK}])
        end = whole.partition(_MARK)[2].rstrip()  # the line break after the end token is not sampled
        if not end:
            raise ChatError("the chat template puts no token after an assistant turn, so no model could learn to stop")
        return end

    def _spoken(self, message: Message, end: str) -> str:
        header = self._render(_OPENING, asks_for_answer=True)
        whole = self._render([*_OPENING, message])
        if not whole.startswith(header):
            raise ChatError("the chat template opens an assistant turn otherwise than it asks for one")
        body, found, _ = whole.removeprefix(header).rpartition(end)
        if not found:
            raise ChatError(f"the chat template does not end this assistant turn with {end}")
        return body + end

    def _between(self, messages: Sequence[Message], end: str) -> str:
        marked = {"role": "assistant", "content": _MARK}
        whole = self._render([*_OPENING, marked, *messages], asks_for_answer=True)
        return whole.partition(_MARK)[2].removeprefix(end)

    def _render(self, messages: Sequence[Message], asks_for_answer: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=asks_for_answer,
                **(self.arguments or {}),
            )
        except (TemplateError, TypeError) as error:  # a template adds strings, and fails on what is none
            raise ChatError(f"the chat template refuses it: {error}") from error
        assert isinstance(text, str)
        return text

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        for text in texts:
            if not _is_unicode(text):
                raise ChatError("the text holds half of a surrogate pair, which is not valid Unicode")
        encoded = self.tokenizer(list(texts), add_special_tokens=add_special_tokens)
        return [tuple(ids) for ids in encoded["input_ids"]]


def as_turns(prompt: Turns) -> Sequence[Message]:
    """The prompt as turns; a text is one user turn."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def prompt_text(prompt: Turns) -> str:
    """The prompt as a person reads it."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0].get("content", ""))
    return "\n".join(f"{message.get('role')}: {message.get('content', '')}" for message in prompt)


def check_messages(value: object) -> None:
    """Refuse what is not a conversation of text turns.

    Raises:
        ChatError: says what is wrong with which turn.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ChatError(f"a prompt is a text or a list of turns, this is {described(value)}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f"turn {number} must be a mapping with a role, this is {described(message)}")
        if not isinstance(message.get("content", ""), str):
            raise ChatError(f"turn {number} must have a text as content, this is {described(message['content'])}")


def _raw_text(prompt: Turns) -> str:
    if not isinstance(prompt, str):
        raise ChatError("a list of turns needs a chat template, and data.apply_chat_template is false")
    return prompt


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def described(value: object) -> str:
    """Type and value of what should not be there, for errors."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"
