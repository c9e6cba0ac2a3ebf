"""Text -> token ids in segments. The ids are those of the whole text, cut where a trained part begins or ends.

A part that is encoded alone may get other tokens than in its place: SentencePiece puts a space before the first word.
Leaves out what the text is (``chat.py``, ``rendering.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlmodule.data.control_tokens import CUT
from rlmodule.data.json_text import HALF_PAIR
from rlmodule.data.messages import ChatError
from rlmodule.data.rendering import Span

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """A run of tokens that is trained (``sampled``) or not."""

    ids: Ids
    sampled: bool


def join(segments: Sequence[Segment]) -> tuple[list[int], list[bool]]:
    """Lay segments end to end: token ids, and a mask that is True on sampled tokens."""
    ids = [token for segment in segments for token in segment.ids]
    mask = [segment.sampled for segment in segments for _ in segment.ids]
    return ids, mask


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Token ids of each text; nothing is added to them. One that is cut is encoded piece by piece, without the marks.

    Raises:
        ChatError: a text is not valid Unicode.
    """
    pieces = [text.split(CUT) for text in texts]
    encoded = [tuple(ids) for ids in _encoded(tokenizer, [first for first, *_ in pieces])["input_ids"]]
    further = [piece for _, *rest in pieces for piece in rest]
    if not further:
        return encoded
    behind = iter(encode_behind(tokenizer, further))
    return [(*ids, *(t for _ in rest for t in next(behind))) for ids, (_, *rest) in zip(encoded, pieces, strict=True)]


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: bool) -> Mapping[str, Any]:
    for text in texts:
        check_unicode(text)
    encoded: Mapping[str, Any] = tokenizer(list(texts), add_special_tokens=False, **options)
    return encoded


def encode_behind(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Token ids of each text as it stands behind a prompt, not at the beginning of a text."""
    # Tokenizers cut the text at special tokens first, so the ids behind one are those behind a prompt.
    tokens = tokenizer.added_tokens_decoder.items()
    anchor = next(((i, token.content) for i, token in tokens if token.special and not token.rstrip), None)
    encoded = encode(tokenizer, [anchor[1] + text for text in texts]) if anchor else []
    if not anchor or any(ids[0] != anchor[0] for ids in encoded):
        return encode(tokenizer, texts)
    return [ids[1:] for ids in encoded]


def encode_spans(tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]) -> list[Segment]:
    """Segments of ``text``: what comes before the first span, the spans, which are trained, and what is between them.

    The first segment has the ids of its text alone, which is what a model is asked with. A token that reaches across
    the end of a span belongs to it. Where one reaches across the beginning of a span, the model could not have drawn
    it, and the parts are encoded one by one, as are those of a text that is cut.

    Raises:
        ChatError: the text is not valid Unicode.
    """
    cuts = [cut for span in spans for cut in (span.start, span.end)]
    if cuts[-1] == len(text):
        del cuts[-1]
    if CUT in text:
        return _segments([*encode(tokenizer, [text[: cuts[0]]]), *_parts_behind(tokenizer, text, cuts)])
    encoded = _encoded(tokenizer, [text, text[: cuts[0]]], return_offsets_mapping=tokenizer.is_fast)
    whole, prompt = (tuple(ids) for ids in encoded["input_ids"])
    if whole[: len(prompt)] != prompt:
        places = None
    elif tokenizer.is_fast:
        places = _places_by_offset(encoded["offset_mapping"][0], text, cuts)
    else:
        places = _places_by_prefix(tokenizer, whole, text, cuts)
    if places is not None:
        places[0] = len(prompt)
        return _segments([whole[a:b] for a, b in pairwise([0, *places, len(whole)])])
    return _segments([prompt, *_parts_behind(tokenizer, text, cuts)])


def _parts_behind(tokenizer: PreTrainedTokenizerBase, text: str, cuts: Sequence[int]) -> list[Ids]:
    return encode_behind(tokenizer, [text[a:b] for a, b in pairwise([*cuts, len(text)])])


def _segments(parts: Sequence[Ids]) -> list[Segment]:
    """What is not trained and what is, in turn."""
    return [Segment(ids, sampled=number % 2 == 1) for number, ids in enumerate(parts)]


def special_prefix(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """The special tokens that the tokenizer puts before a text; those it puts behind one would end a prompt."""
    [alone] = encode(tokenizer, ["x"])
    [ids] = tokenizer(["x"], add_special_tokens=True)["input_ids"]
    places = (i for i in range(len(ids)) if tuple(ids[i : i + len(alone)]) == alone)
    return tuple(ids[: next(places, 0)])


def check_unicode(text: str) -> None:
    """Refuse text that cannot be written as UTF-8.

    Raises:
        ChatError: it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ChatError(HALF_PAIR) from None


def _places_by_offset(offsets: Sequence[tuple[int, int]], text: str, cuts: Sequence[int]) -> list[int] | None:
    """For each cut the first token behind it; None where a token reaches across the beginning of a span.

    Args:
        offsets: first character of each token of the text, and the one behind it.
        text: the text.
        cuts: begins and ends of spans in turn.
    """
    begins, ends, reached = list[int](), list[int](), 0
    for begin, end in offsets:
        # Some tokenizers leave the space before a word out of the word's offsets; it belongs to it all the same.
        begins.append(min(begin, reached))
        reached = max(reached, end)
        ends.append(reached)
    places = [bisect_left(begins, cut) for cut in cuts]
    for place, cut in list(zip(places, cuts, strict=True))[::2]:
        if place and text[cut : ends[place - 1]].strip():
            return None
    return places


def _places_by_prefix(
    tokenizer: PreTrainedTokenizerBase, whole: Ids, text: str, cuts: Sequence[int]
) -> list[int] | None:
    """The same for tokenizers that know no offsets."""
    beginnings = encode(tokenizer, [text[:cut] for cut in cuts])
    is_prefix = all(whole[: len(ids)] == ids for ids in beginnings)
    return [len(ids) for ids in beginnings] if is_prefix else None
