"""Laws of pairs: both responses follow one prompt, whatever form the row has; a bad row is named with its place."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlmodule.core.errors import DataError
from rlmodule.data.config import DataConfig
from rlmodule.data.demonstrations import file_demonstrations
from rlmodule.data.preferences import environment_preferences, file_preferences
from rlmodule.environments.sort import Sort
from rlmodule.models.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
END, USER, ASSISTANT = 257, 258, 259


def turn(role, content):
    return {"role": role, "content": content}


def from_rows(tmp_path, *rows, **keys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file_preferences(DataConfig(train_files=[str(path)], **keys), TOKENIZER, "train")


def tokens(sample):
    return sample.prompt.ids, sample.response_ids.tolist(), sample.loss_mask.tolist()


def test_every_form_of_a_row_says_the_same(tmp_path):
    question, good, bad = turn("user", "q"), turn("assistant", "yes"), turn("assistant", "no")
    pairs = from_rows(
        tmp_path,
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": [good], "rejected": [bad]},
        {"prompt": [question], "chosen": [good], "rejected": [bad]},
        {"prompt": [question], "chosen": "yes", "rejected": "no"},
        {"chosen": [question, good], "rejected": [question, bad]},
        {"prompt": "q", "chosen": [question, good], "rejected": [question, bad]},
        {"prompt": [question], "chosen": [question, good], "rejected": [bad]},
    )
    for number, pair in enumerate(pairs):
        assert tokens(pair.chosen) == ((USER, *b"q", ASSISTANT), [*b"yes", END], [True] * 4)
        assert tokens(pair.rejected) == ((USER, *b"q", ASSISTANT), [*b"no", END], [True] * 3)
        assert (pair.chosen.sample_id, pair.rejected.sample_id) == (2 * number, 2 * number + 1)
        assert pair.chosen.group_id == pair.rejected.group_id == number
        assert (pair.chosen.text, pair.rejected.text) == ("yes", "no")
        assert pair.chosen.response_ids.dtype == torch.int64


def test_a_text_without_a_prompt_is_cut_where_its_responses_begin_to_differ(tmp_path):
    """The space before the first differing word belongs to the responses, as in TRL's implicit prompts."""
    [pair] = from_rows(
        tmp_path, {"chosen": "Q: 2+2? A: four", "rejected": "Q: 2+2? A: nine"}, apply_chat_template=False
    )
    assert tokens(pair.chosen) == (tuple(b"Q: 2+2? A:"), [*b" four", END], [True] * 6)
    assert tokens(pair.rejected) == (tuple(b"Q: 2+2? A:"), [*b" nine", END], [True] * 6)


def test_assistant_turns_before_the_last_question_are_context(tmp_path):
    """They are the same in both responses, so training on them could only add noise."""
    history = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    row = {"chosen": [*history, turn("assistant", "yes")], "rejected": [*history, turn("assistant", "no")]}
    [implicit] = from_rows(tmp_path, row)
    [explicit] = from_rows(tmp_path, {"prompt": history, "chosen": "yes", "rejected": "no"})
    expected = (USER, *b"a", ASSISTANT, *b"b", END, USER, *b"c", ASSISTANT)
    for pair in (implicit, explicit):
        assert tokens(pair.chosen) == (expected, [*b"yes", END], [True] * 4)
        assert tokens(pair.rejected) == (expected, [*b"no", END], [True] * 3)


def test_responses_of_several_turns_train_the_assistant_alone(tmp_path):
    more = [turn("assistant", "x"), turn("tool", "y"), turn("assistant", "z")]
    [pair] = from_rows(tmp_path, {"prompt": "q", "chosen": more, "rejected": "no"})
    assert pair.chosen.response_ids.tolist() == [*b"x", END, USER, *b"y", ASSISTANT, *b"z", END]
    assert pair.chosen.loss_mask.tolist() == [True] * 2 + [False] * 3 + [True] * 2


def test_a_response_has_the_ids_of_the_same_demonstration(tmp_path):
    [pair] = from_rows(tmp_path, {"prompt": "q", "chosen": "yes", "rejected": "no"})
    path = tmp_path / "shown.jsonl"
    path.write_text('{"prompt": "q", "completion": "yes"}\n')
    [shown] = file_demonstrations(DataConfig(train_files=[str(path)]), TOKENIZER, "train")
    assert tokens(shown) == tokens(pair.chosen)


def test_parquet_and_columns_of_other_names(tmp_path):
    pq.write_table(
        pa.table({"question": ["q"], "good": [[turn("assistant", "yes")]], "bad": [[turn("assistant", "no")]]}),
        tmp_path / "rows.parquet",
    )
    config = DataConfig(
        train_files=[str(tmp_path / "rows.parquet")], prompt_key="question", chosen_key="good", rejected_key="bad"
    )
    [pair] = file_preferences(config, TOKENIZER, "train")
    assert tokens(pair.rejected) == ((USER, *b"q", ASSISTANT), [*b"no", END], [True] * 3)


def test_prompts_above_the_limit_follow_the_rule(tmp_path):
    rows = [{"prompt": prompt, "chosen": "x", "rejected": "y"} for prompt in ("abc", "abcd")]  # 5 and 6 tokens
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the prompt has 6 tokens"):
        from_rows(tmp_path, *rows, max_prompt_length=5)
    [kept] = from_rows(tmp_path, *rows, max_prompt_length=5, overlong_prompt="filter")
    assert (kept.chosen.prompt.text, kept.chosen.prompt.row) == ("abc", 0)
    cut = from_rows(tmp_path, *rows, max_prompt_length=5, overlong_prompt="truncate_left")[1]
    assert cut.chosen.prompt.ids == cut.rejected.prompt.ids == (*b"abcd", ASSISTANT)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "q", "chosen": "a"}, "no 'rejected'"),
        ({"prompt": "q", "chosen": 5, "rejected": "b"}, "column 'chosen': a prompt is a text or a list of turns"),
        ({"prompt": [turn("assistant", "q")], "chosen": "a", "rejected": "b"}, "ends with an assistant turn"),
        ({"chosen": "yes", "rejected": "no"}, "do not differ after a common beginning"),
        ({"chosen": "same", "rejected": "same"}, "do not differ after a common beginning"),
        ({"chosen": "text", "rejected": [turn("user", "q")]}, "one response is a text and the other are turns"),
        ({"prompt": "q", "chosen": [turn("user", "a")], "rejected": "b"}, "must begin with an assistant turn"),
        ({"prompt": "q", "chosen": "a", "rejected": [turn("user", "q")]}, "must begin with an assistant turn"),
        (
            {"prompt": "q", "chosen": [turn("assistant", "a"), turn("user", "q")], "rejected": "b"},
            "end with an assistant turn",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, says):
    with pytest.raises(DataError, match=r"rows\.jsonl:2: ") as caught:
        from_rows(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b"}, row)
    assert says in str(caught.value)
    assert "row" in caught.value.fix


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    with pytest.raises(
        DataError, match=r"no column 'rejected'; its columns are prompt, chosen\. Set data\.rejected_key"
    ):
        from_rows(tmp_path, {"prompt": "q", "chosen": "a"})
    with pytest.raises(DataError, match=r"no column 'ask'; .* Set data\.prompt_key"):
        from_rows(tmp_path, {"chosen": "a", "rejected": "b"}, prompt_key="ask")


def test_an_environment_makes_pairs():
    environment = Sort(train_size=5)
    pairs = environment_preferences(environment.preferences(9, seed=2), "sort", DataConfig(), TOKENIZER)
    for pair, (prompt, right, wrong) in zip(pairs, environment.preferences(9, seed=2), strict=True):
        assert pair.chosen.prompt.ids == pair.rejected.prompt.ids == (USER, *prompt.encode(), ASSISTANT)
        assert (pair.chosen.text, pair.rejected.text) == (right, wrong)
