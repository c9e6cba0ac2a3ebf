"""Laws of tokens in their place: ids are those of the whole text, and a prompt has the ids a model is asked with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from rlmodule.data.chat import ChatError, ChatFormat
from rlmodule.data.rendering import Span
from rlmodule.data.tokens import Segment, encode_behind, encode_spans, special_prefix
from rlmodule.models.byte_tokenizer import byte_tokenizer

ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def sentencepiece(template=None, ends_prompts=False):
    """Puts a space before the first word of a text, as SentencePiece does; words of one sign, and pairs of signs."""
    signs = [*"▁0123456789abcq?+=\n", "▁4", "=4"]
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", "<|user|>", "<|assistant|>", *signs])}
    backend = Tokenizer(BPE(vocabulary, [("▁", "4"), ("=", "4")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    if ends_prompts:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = template
    return tokenizer


def tokens(tokenizer, segment):
    return tokenizer.convert_ids_to_tokens(list(segment.ids))


def test_t2b_13_the_ids_are_those_of_the_whole_text():
    """T2B-13: a response encoded alone would begin with a space."""
    tokenizer = sentencepiece(ZEPHYR)
    prompt, said = ChatFormat(tokenizer).encode_demonstration("q", "4")
    assert tokens(tokenizer, said) == ["4", "</s>"]
    assert tokenizer("4", add_special_tokens=False)["input_ids"] == tokenizer.convert_tokens_to_ids(["▁4"])
    whole = "<|user|>\nq</s>\n<|assistant|>\n4</s>"
    assert [*prompt.ids, *said.ids] == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_t2b_13_raw_responses_too():
    """T2B-13, without a template: the response is encoded behind its prompt."""
    tokenizer = sentencepiece()
    chat = ChatFormat(tokenizer, template=False)
    prompt, said = chat.encode_demonstration("2+2?", "4")
    assert tokens(tokenizer, said) == ["4", "</s>"]
    assert (prompt.ids,) == tuple(chat.encode_prompts(["2+2?"]))
    [alone] = encode_behind(tokenizer, ["4"])  # of stored responses without token ids
    assert tokenizer.convert_ids_to_tokens(list(alone)) == ["4"]


def test_a_token_that_reaches_into_the_response_is_split_at_the_prompt():
    """A model asked with the prompt could never draw it: the prompt keeps its ids, the response gets those it can."""
    tokenizer = sentencepiece()
    assert tokenizer.convert_tokens_to_ids("=4") in tokenizer("2+2=4", add_special_tokens=False)["input_ids"]
    prompt, said = ChatFormat(tokenizer, template=False).encode_demonstration("2+2=", "4")
    assert tokens(tokenizer, prompt) == ["▁", "2", "+", "2", "="]
    assert tokens(tokenizer, said) == ["4", "</s>"]


@pytest.mark.parametrize("ends_prompts", [False, True])
def test_t2b_15_a_raw_prompt_gets_no_end_token(ends_prompts):
    """T2B-15: what the tokenizer puts in front stays."""
    tokenizer = sentencepiece(ends_prompts=ends_prompts)
    start = ["<s>"] if ends_prompts else []
    chat = ChatFormat(tokenizer, template=False)
    [ids] = chat.encode_prompts(["2+2="])
    assert tokenizer.convert_ids_to_tokens(list(ids)) == [*start, "▁", "2", "+", "2", "="]
    prompt, said = chat.encode_demonstration("2+2=", "4")
    assert prompt.ids == ids
    assert tokens(tokenizer, said) == ["4", "</s>"]


def test_t2b_15_an_end_token_alone_is_no_prefix():
    """T2B-15: T5 and its kin put nothing in front."""
    tokenizer = sentencepiece()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    assert special_prefix(tokenizer) == ()


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=2, max_size=7),
)
def test_every_character_is_in_the_segment_of_its_part(parts):
    """Also where a character takes several tokens."""
    tokenizer = byte_tokenizer()
    text, spans, at = "".join(parts), [], 0
    for number, part in enumerate(parts):
        if number % 2:
            spans.append(Span(at, at + len(part)))
        at += len(part)
    segments = encode_spans(tokenizer, text, spans)
    assert [tokenizer.decode(segment.ids) for segment in segments] == parts
    assert [segment.sampled for segment in segments] == [bool(number % 2) for number in range(len(parts))]


def words(**options):
    """One token a word, and a special token that swallows white space around it as asked."""
    names = ["<pad>", "<end>", "a", "b", "c", " "]
    backend = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    tokenizer.add_special_tokens({"eos_token": AddedToken("<end>", special=True, normalized=False, **options)})
    return tokenizer


def test_an_end_token_that_swallows_the_line_break_behind_it_belongs_to_its_turn():
    """Phi-3's tokens do."""
    tokenizer = words(rstrip=True)
    text = "a b<end> c<end>"
    segments = encode_spans(tokenizer, text, [Span(2, 8), Span(9, 15)])
    assert [tokens(tokenizer, s) for s in segments] == [["a", " "], ["b", "<end>"], [], ["c", "<end>"]]


def test_tokenizers_without_offsets_give_the_same(monkeypatch):
    fast = byte_tokenizer()
    expected = encode_spans(fast, "questionanswer<|e|>more", [Span(8, 19)])
    monkeypatch.setattr(type(fast), "is_fast", property(lambda self: False))
    assert encode_spans(fast, "questionanswer<|e|>more", [Span(8, 19)]) == expected
    assert expected[1] == Segment((*b"answer", 257), sampled=True)


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(ChatError, match="half of a surrogate pair"):
        encode_behind(byte_tokenizer(), ["\ud83d"])
