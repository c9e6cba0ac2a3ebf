"""Laws of the byte tokenizer: ids are bytes, text survives, the assistant's own tokens are marked."""

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rlmodule.models.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
PAD, END, USER, ASSISTANT = 256, 257, 258, 259
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "tool", "content": "x"},
    {"role": "assistant", "content": ""},
]


def test_the_id_of_a_byte_is_the_byte_and_specials_follow():
    text = bytes(range(128)).decode() + "é日😀"
    assert TOKENIZER(text)["input_ids"] == list(text.encode())
    assert TOKENIZER.convert_tokens_to_ids(["<|pad|>", "<|e|>", "<|u|>", "<|a|>"]) == [PAD, END, USER, ASSISTANT]
    assert (len(TOKENIZER), TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (260, PAD, END)


@given(st.text())
def test_any_text_comes_back_unchanged(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_the_template_marks_what_the_assistant_says_and_its_end():
    encoded = TOKENIZER.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded["input_ids"] == [USER, *b"hi", ASSISTANT, *b"ho", END, USER, *b"x", ASSISTANT, END]
    assert encoded["assistant_masks"] == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1]
    asked = TOKENIZER.apply_chat_template(TURNS[:1], add_generation_prompt=True)["input_ids"]
    assert asked == [USER, *b"hi", ASSISTANT]


def test_it_pads_on_the_left():
    assert TOKENIZER(["a", "bcd"], padding=True)["input_ids"] == [[PAD, PAD, *b"a"], [*b"bcd"]]


def test_a_saved_copy_is_equal(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    copy = AutoTokenizer.from_pretrained(tmp_path)
    assert copy.get_vocab() == TOKENIZER.get_vocab()
    assert copy.special_tokens_map == TOKENIZER.special_tokens_map
    assert (copy.padding_side, copy.chat_template) == (TOKENIZER.padding_side, TOKENIZER.chat_template)
    assert copy.apply_chat_template(TURNS)["input_ids"] == TOKENIZER.apply_chat_template(TURNS)["input_ids"]
    assert copy.decode(copy("  a , b's\r\n é")["input_ids"]) == "  a , b's\r\n é"
