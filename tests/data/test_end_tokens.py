"""One set of end tokens, from template, tokenizer, generation settings and the user's keys; cases by their ids."""

import json

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlmodule.core.errors import ConfigError
from rlmodule.data.chat import ChatFormat
from rlmodule.data.config import DataConfig
from rlmodule.data.demonstrations import file_demonstrations
from rlmodule.data.end_tokens import EndTokens, find_end_tokens
from rlmodule.data.rollouts import load_rollouts
from rlmodule.models.byte_tokenizer import byte_tokenizer

END = 257  # of the byte tokenizer, which its template ends turns with as well
WORDS = ["<pad>", "<eos>", "q", "yes", "<end_of_turn>", "<start_of_turn>", "user", "model", "###", "<unk>"]
GEMMA = (
    "{%- for m in messages -%}<start_of_turn> {{ 'model' if m.role == 'assistant' else 'user' }} {{ m.content }} "
    "<end_of_turn>\n{% endfor -%}{%- if add_generation_prompt -%}<start_of_turn> model {% endif -%}"
)


def word_tokenizer(template=GEMMA, eos="<eos>", special=("<end_of_turn>", "<start_of_turn>")):
    """One token per word; ``<end_of_turn>`` is number 4 and ``<eos>`` number 1."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        unk_token="<unk>",
        additional_special_tokens=list(special),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def test_t2b_01_the_token_that_the_template_ends_a_turn_with_ends_a_response():
    """T2B-01: Gemma writes <end_of_turn> (4), its tokenizer calls <eos> (1) the end."""
    assert find_end_tokens(ChatFormat(word_tokenizer()), generation=[1, 4]).ids == (4, 1)
    assert find_end_tokens(ChatFormat(word_tokenizer())).ids == (4, 1), "also without generation settings"
    assert find_end_tokens(ChatFormat(word_tokenizer(), template=False)).ids == (1,), "raw text has no turns"


@pytest.mark.parametrize("generation", [(257, 48), (48, 257), (48,)])
def test_t2a_26_end_tokens_of_the_generation_settings_end_a_response(generation):
    """T2A-26: eos_token_id [257, 48] of generation_config.json (Gemma: 1 and 106; Llama 3: 128001, 128008, 128009)."""
    assert sorted(find_end_tokens(ChatFormat(byte_tokenizer()), generation).ids) == [48, 257]


def test_keys_of_the_user_add_to_them_and_each_is_there_once():
    found = find_end_tokens(ChatFormat(byte_tokenizer()), [END, 48], [10, 48], ["Question:"])
    assert found == EndTokens((END, 48, 10), ("Question:",))
    assert found.describe(byte_tokenizer()) == "<|e|> (257), 0 (48), Ċ (10) or 'Question:'"
    assert EndTokens((END,)).describe(byte_tokenizer()) == "<|e|> (257)"
    special = find_end_tokens(ChatFormat(byte_tokenizer()), stop=["<|u|>", "u"])
    assert special == EndTokens((END, 258), ("u",)), "texts are looked for in text, which has no special tokens"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("<end_of_turn>\n", 4),
        (" <end_of_turn>", 4),
        ("<end_of_turn> <eos>", 4),  # phi3 ends the last turn with two
        ("<eos>", 1),
        (" ###\n", 8),  # a word of the vocabulary that is no special token
        ("", None),
        ("\n", None),
        (" Human:", None),  # several tokens, or none the tokenizer knows
    ],
)
def test_what_a_template_puts_after_an_assistant_turn(end, expected):
    template = "{% for m in messages %}{{ m.content }}" + (end or "") + "{% endfor %}"
    assert ChatFormat(word_tokenizer(template)).end_of_turn() == expected


def test_a_word_cut_in_pieces_ends_nothing_by_itself():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}###{% endfor %}"
    assert ChatFormat(tokenizer).end_tokens() == (END,)


def test_a_template_that_takes_prompts_alone_leaves_the_tokenizers_own():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    assert ChatFormat(tokenizer).end_tokens() == (END,)


def test_a_tokenizer_without_an_end_token_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    raw = ChatFormat(tokenizer, template=False)
    with pytest.raises(ConfigError, match="no response could ever end") as caught:
        find_end_tokens(raw)
    assert caught.value.key == "model.tokenizer"
    assert find_end_tokens(raw, stop_token_ids=[10]).ids == (10,)


def test_stored_and_demonstrated_texts_end_as_sampled_ones_do(tmp_path):
    """With <end_of_turn>, which the policy is to draw, and not with <eos>."""
    tokenizer, path = word_tokenizer(), tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "response": "yes", "completion": "yes", "reward": 1.0}) + "\n")
    data = DataConfig(train_files=[str(path)])
    [response] = load_rollouts(str(path), data, tokenizer, 10).read([0])
    assert response.response_ids.tolist() == [3, 4]
    [demonstration] = file_demonstrations(data, tokenizer, "train")
    assert demonstration.response_ids.tolist() == [3, 4]
    raw = DataConfig(train_files=[str(path)], apply_chat_template=False)
    assert load_rollouts(str(path), raw, tokenizer, 10).read([0])[0].response_ids.tolist() == [3, 1]
    assert file_demonstrations(raw, tokenizer, "train")[0].response_ids.tolist() == [3, 1]


@pytest.mark.parametrize("text", ["b", "ab", "né", "\n\nQ"])
def test_a_text_is_found_as_soon_as_its_last_token_is_there(text):
    """A token of the byte tokenizer is a byte, so characters and texts reach over several; special ones between them do not count."""
    tokenizer, ends = byte_tokenizer(), EndTokens((END,), ("zz", text))
    ids = tokenizer("x" * 40 + text, add_special_tokens=False)["input_ids"]
    ids[-1:-1] = [256] * 20
    assert [ends.spelled(ids[:n], tokenizer) for n in range(1, len(ids) + 1)] == [False] * (len(ids) - 1) + [True]


def test_without_texts_nothing_is_spelled():
    assert not EndTokens((END,)).spelled([97, 98], byte_tokenizer())
