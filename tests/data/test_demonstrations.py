"""Laws of supervised samples: the response is trained with its end, the prompt and tool turns are not."""

import json

import pytest
import torch

from rlmodule.core.errors import DataError
from rlmodule.data.config import DataConfig
from rlmodule.data.demonstrations import environment_demonstrations, file_demonstrations
from rlmodule.data.prompts import load_prompts
from rlmodule.environments.sort import Sort
from rlmodule.models.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
END, USER, ASSISTANT = 257, 258, 259
QUESTION, CALL, RESULT, REPLY = (
    {"role": role, "content": content}
    for role, content in [("user", "q"), ("assistant", "call"), ("tool", "42"), ("assistant", "ok")]
)


def from_rows(tmp_path, rows, **keys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file_demonstrations(DataConfig(train_files=[str(path)], **keys), TOKENIZER, "train")


def test_an_environment_is_demonstrated_by_samples():
    environment = Sort(train_size=5)
    samples = environment_demonstrations(environment.demonstrations(9, seed=2), "sort", DataConfig(), TOKENIZER)
    for number, ([sample], (prompt, response)) in enumerate(
        zip(samples, environment.demonstrations(9, seed=2), strict=True)
    ):
        assert (sample.sample_id, sample.group_id, sample.text) == (number, number, response)
        assert sample.prompt.ids == (USER, *prompt.encode(), ASSISTANT)
        assert sample.response_ids.tolist() == [*response.encode(), END]
        assert sample.loss_mask.all()
        assert (sample.response_ids.dtype, sample.loss_mask.dtype) == (torch.int64, torch.bool)


def test_a_demonstrated_prompt_has_the_ids_of_the_same_prompt_in_reinforcement(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "sort 21", "completion": "12"}\n')
    config = DataConfig(train_files=[str(path)])
    [sample] = file_demonstrations(config, TOKENIZER, "train")
    [prompt] = load_prompts(config, TOKENIZER, "train")
    assert sample.prompt == prompt


def test_texts_turns_and_conversations_say_the_same(tmp_path):
    rows = [
        {"prompt": "q", "completion": "ok", "messages": None},
        {"prompt": [QUESTION], "completion": [REPLY], "messages": None},
        {"prompt": [QUESTION, REPLY], "completion": None, "messages": None},
    ]
    samples = from_rows(tmp_path, rows)
    for sample in samples:
        assert sample.prompt.ids == (USER, *b"q", ASSISTANT)
        assert sample.response_ids.tolist() == [*b"ok", END]


def test_tool_turns_inside_a_response_are_not_trained(tmp_path):
    [sample] = from_rows(tmp_path, [{"messages": [QUESTION, CALL, RESULT, REPLY]}])
    assert sample.response_ids.tolist() == [*b"call", END, USER, *b"42", ASSISTANT, *b"ok", END]
    assert sample.loss_mask.tolist() == [True] * 5 + [False] * 4 + [True] * 3
    assert sample.meta.loss_tokens == 8


def test_prompts_above_the_limit_follow_the_rule(tmp_path):
    rows = [{"prompt": "abc", "completion": "x"}, {"prompt": "abcd", "completion": "y"}]  # 5 and 6 tokens
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the prompt has 6 tokens"):
        from_rows(tmp_path, rows, max_prompt_length=5)
    [kept] = from_rows(tmp_path, rows, max_prompt_length=5, overlong_prompt="filter")
    assert kept.text == "x"
    cut = from_rows(tmp_path, rows, max_prompt_length=5, overlong_prompt="truncate_left")[1]
    assert cut.prompt.ids == (*b"abcd", ASSISTANT)
    assert cut.response_ids.tolist() == [*b"y", END]


def test_a_row_without_a_response_is_named(tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*end with an assistant turn"):
        from_rows(tmp_path, [{"prompt": "q", "completion": "a"}, {"prompt": "q"}])
