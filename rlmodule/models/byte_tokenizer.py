"""The tokenizer of the embedded default: one token per byte of UTF-8, and four special tokens for chat.

Needs no file and no download. The id of a byte is the byte; 260 ids in all. Leaves out merges: nothing is learned.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT = "<|pad|>", "<|e|>", "<|u|>", "<|a|>"  # ids 256, 257, 258, 259

# Every turn that is not the assistant's opens with <|u|>: 4 roles would cost a small model 2 more symbols to learn.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '" + ASSISTANT + "' -}}"
    "{%- generation -%}{{- message['content'] + '" + END + "' -}}{%- endgeneration -%}"
    "{%- else -%}{{- '" + USER + "' + message['content'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '" + ASSISTANT + "' -}}{%- endif -%}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that encodes and decodes any UTF-8 text unchanged.

    Returns:
        Pads on the left with ``<|pad|>``, ends a turn with ``<|e|>``, and saves and reloads through ``AutoTokenizer``.
    """
    backend = Tokenizer(BPE(vocab={_symbol(byte): byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, END, USER, ASSISTANT])  # here, so that the ids come in this order
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _symbol(byte: int) -> str:
    """The printable character that stands for ``byte`` in byte-level vocabularies.

    Visible Latin-1 characters stand for themselves; the n-th of the other bytes is written as code point 256 + n.
    """
    return chr(byte) if _is_visible(byte) else chr(256 + sum(not _is_visible(lower) for lower in range(byte)))


def _is_visible(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD)  # 0xAD is the soft hyphen
