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
        if not self.end_tokens():
            raise ChatError("the tokenizer has no end-of-sequence token, so a response cannot be ended")
        end = self.end_tokens()[0]
        [prompt_ids] = self.encode_prompts([prompt])
        [response_ids] = self._encode([response], add_special_tokens=False)
        return [Segment(prompt_ids, sampled=False), Segment((*response_ids, end), sampled=True)]

    def encode_observation(self, messages: Sequence[Message], after: int) -> tuple[int, ...]:
        """Token ids that follow an assistant turn, up to where the assistant speaks again; ``messages`` lie between.

        Nothing that was sampled is encoded again: the ids are appended to those of the episode so far.

        Args:
            messages: what the environment says, of any role but the assistant's.
            after: last token of the assistant turn; where that is not the template's own end, the end comes first.

        Raises:
            ChatError: there is no template, it refuses the messages, or no conversation is continued by appending.
        """
        if not self.template:
            raise ChatError("messages need a chat template, and data.apply_chat_template is false")
        asked = self._render(_OPENING, asks_for_answer=True)
        spoken = {"role": "assistant", "content": _MARK}
        whole = self._render([*_OPENING, spoken, *messages], asks_for_answer=True)
        if not whole.startswith(asked + _MARK):
            raise ChatError("the chat template writes an assistant turn otherwise once another turn follows it")
        [ids] = self._encode([whole.removeprefix(asked + _MARK)], add_special_tokens=False)
        return ids[1:] if ids[:1] == (after,) else ids

    def end_of_turn(self) -> int | None:
        """The token with which the template ends an assistant turn that nothing follows; None where it puts none."""
        if not self.template:
            return None
        try:
            whole = self._render([*_OPENING, {"role": "assistant", "content": _MARK}])
        except ChatError:
            return None  # a template for prompts alone
        words = whole.partition(_MARK)[2].split()
        [ids] = self._encode([*words, ""][:1], add_special_tokens=False)
        # The first piece of a word such as "###" that takes several tokens ends nothing by itself.
        is_whole = len(ids) == 1 or (len(ids) > 1 and ids[0] in self.tokenizer.added_tokens_decoder)
        return ids[0] if is_whole and ids[0] != self.tokenizer.unk_token_id else None

    def end_tokens(self) -> tuple[int, ...]:
        """What ends a response as far as template and tokenizer say; the first ends a response given as text."""
        found = (self.end_of_turn(), self.tokenizer.eos_token_id)
        return tuple(dict.fromkeys(token for token in found if token is not None))

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
