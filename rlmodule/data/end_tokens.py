"""Where a response ends: one set of end tokens for responses that are sampled, stored, demonstrated or served.

Leaves out who stops there (``rollout/``) and where a model's generation settings are read (``models/description.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import ConfigError
from rlmodule.data.chat import ChatFormat


@dataclass(frozen=True)
class EndTokens:
    """What ends a response.

    Args:
        ids: token ids that end it, all of equal effect; the first is what ends a response given as text.
        texts: texts that end it once the sampled tokens spell them.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...] = ()

    def spelled(self, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the last tokens of a response spell one of the texts, special tokens left out as in its text.

        Args:
            ids: the response so far, whose last token is new.
            tokenizer: decodes them.
        """
        special, longest = set(tokenizer.all_special_ids), max((len(t.encode()) for t in self.texts), default=0)
        # A token stands for a byte or more; a few more in front, since what is decoded from the middle may begin badly.
        recent = [token for token in ids if token not in special][-longest - 4 :]
        decoded = str(tokenizer.decode(recent)) if self.texts else ""
        return any(text in decoded for text in self.texts)

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """For the run's plan: ``<|im_end|> (151645), <|endoftext|> (151643) or 'Question:'``."""
        tokens = [f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in self.ids]
        *others, last = tokens + [repr(text) for text in self.texts]
        return f"{', '.join(others)} or {last}" if others else last


def find_end_tokens(
    chat: ChatFormat, generation: Iterable[int] = (), stop_token_ids: Iterable[int] = (), stop: Iterable[str] = ()
) -> EndTokens:
    """The end tokens of a run: the chat template's, the tokenizer's, the model's and the user's, each once.

    A chat model is often trained to end its turn with another token than its tokenizer calls the end of a sequence:
    ``<end_of_turn>`` beside ``<eos>``, ``<|eot_id|>`` beside ``<|end_of_text|>``.

    Args:
        chat: the tokenizer, and the template where prompts go through one.
        generation: end tokens of the model's ``generation_config.json``.
        stop_token_ids: ``rollout.stop_token_ids``.
        stop: ``rollout.stop``; one that is a special token stands for that token.

    Raises:
        ConfigError: there is no end token at all.
    """
    added, texts = chat.tokenizer.get_added_vocab(), tuple(stop)
    tokens = [added[text] for text in texts if text in added]
    ids = tuple(dict.fromkeys([*chat.end_tokens(), *generation, *stop_token_ids, *tokens]))
    if not ids:
        raise ConfigError(
            key="model.tokenizer",
            got=chat.tokenizer.name_or_path,
            because="neither it nor the model names an end token, so no response could ever end",
            fix="Set eos_token in its tokenizer_config.json, or rollout.stop_token_ids",
        )
    return EndTokens(ids, tuple(text for text in texts if text not in added))
