"""Laws of the prompt table: checked at the start, the same prompt however it is asked for."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.core.types import Prompt
from rlmodule.data.config import DataConfig
from rlmodule.data.prompts import load_prompts
from rlmodule.data.rows import open_rows
from rlmodule.data.tables import MemoryTable
from rlmodule.environments.countdown import Countdown
from rlmodule.models.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
USER, ASSISTANT = 258, 259


@pytest.fixture
def lines(tmp_path):
    """Writes rows to a .jsonl file and returns its path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_an_environment_gives_prompts_with_answers_and_what_its_reward_needs():
    environment = Countdown(train_size=20, test_size=5)
    config, rows = DataConfig(), {split: MemoryTable(split, environment.rows(split)) for split in ("train", "test")}
    table = load_prompts(config, TOKENIZER, "train", rows["train"])
    row = environment.rows("train")[7]
    assert len(table) == 20
    assert table[7] == Prompt(
        row=7,
        ids=(USER, *row["prompt"].encode(), ASSISTANT),
        text=row["prompt"],
        answer=row["answer"],
        source="countdown",
        meta={name: row[name] for name in ("answer", "source", "numbers", "solution")},
    )
    assert [prompt.text for prompt in load_prompts(config, TOKENIZER, "test", rows["test"])] == [
        row["prompt"] for row in environment.rows("test")
    ]


def test_files_of_several_kinds_and_formats_form_one_table(lines, tmp_path):
    first = lines([{"prompt": "a", "solution": 1}, {"prompt": "b", "solution": 2}])
    second = str(tmp_path / "rows.parquet")
    verl = {"data_source": "s", "prompt": [{"role": "user", "content": "c"}], "reward_model": {"ground_truth": "3"}}
    pq.write_table(pa.Table.from_pylist([verl]), second)
    third = lines([{"question": "d", "answer": "4"}], name="more.jsonl")
    table = load_prompts(DataConfig(train_files=[first, second, third]), TOKENIZER, "train")
    assert [(prompt.row, prompt.text, prompt.answer) for prompt in table] == [
        (0, "a", "1"),
        (1, "b", "2"),
        (2, "c", "3"),
        (3, "d", "4"),
    ]
    assert table.select([3, 0, 2, 3]) == [table[3], table[0], table[2], table[3]]
    assert (table[-1], table[1:3]) == (table[3], [table[1], table[2]])
    assert [table.location(row) for row in range(4)] == [f"{first}:1", f"{first}:2", f"{second}:1", f"{third}:1"]
    with pytest.raises(IndexError):
        table[4]


def test_long_prompts_are_refused_filtered_or_cut_on_the_left(lines):
    path = lines([{"prompt": "abc"}, {"prompt": "abcdefg"}, {"prompt": "abcdefgh"}])  # 5, 9, 10 tokens with 2 of chat
    with pytest.raises(DataError, match=r"9 tokens .*max_prompt_length is 8 \(2 of 3 rows are longer\)") as caught:
        load_prompts(DataConfig(train_files=[path], max_prompt_length=8), TOKENIZER, "train")
    assert caught.value.location == f"{path}:2"

    def load(rule):
        return load_prompts(
            DataConfig(train_files=[path], max_prompt_length=8, overlong_prompt=rule), TOKENIZER, "train"
        )

    filtered = load("filter")
    assert [prompt.text for prompt in filtered] == ["abc"]
    assert (filtered.num_filtered, filtered.num_truncated) == (2, 0)
    assert filtered.lengths.tolist() == [5]
    assert "2 longer ones filtered out" in filtered.describe()

    cut = load("truncate_left")
    assert cut[1].ids == (*b"abcdefg", ASSISTANT)  # its first token was <|u|>
    assert (cut.num_filtered, cut.num_truncated) == (0, 2)
    assert cut.lengths.tolist() == [len(prompt.ids) for prompt in cut] == [5, 8, 8]


def test_a_kept_row_knows_its_place_in_the_file(lines):
    path = lines([{"prompt": "too long"}, {"prompt": "b"}])
    config = DataConfig(train_files=[path], max_prompt_length=4, overlong_prompt="filter")
    [prompt] = load_prompts(config, TOKENIZER, "train")
    assert (prompt.row, prompt.text) == (1, "b")


def test_filtering_everything_is_an_error(lines):
    path = lines([{"prompt": "abc"}])
    with pytest.raises(DataError, match=r"filtering leaves none\. Use data\.max_prompt_length=5"):
        load_prompts(DataConfig(train_files=[path], max_prompt_length=4, overlong_prompt="filter"), TOKENIZER, "train")


def test_a_row_the_template_refuses_is_named(lines):
    bad = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = lines([{"prompt": "a"}, {"prompt": bad}])
    with pytest.raises(DataError, match="must not end with an assistant turn") as caught:
        load_prompts(DataConfig(train_files=[path]), TOKENIZER, "train")
    assert caught.value.location == f"{path}:2"


def test_a_prompt_without_tokens_is_refused(lines):
    path = lines([{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(DataError, match="the prompt is empty") as caught:
        load_prompts(DataConfig(train_files=[path], apply_chat_template=False), TOKENIZER, "train")
    assert caught.value.location == f"{path}:2"


def test_validation_rows_can_be_limited(lines):
    files = [lines([{"prompt": "a"}, {"prompt": "b"}]), lines([{"prompt": "c"}, {"prompt": "d"}], name="more.jsonl")]
    config = DataConfig(train_files=files, val_files=files, val_max_rows=3)
    assert [prompt.text for prompt in load_prompts(config, TOKENIZER, "test")] == ["a", "b", "c"]
    assert len(load_prompts(config, TOKENIZER, "train")) == 4


def test_columns_are_checked_without_a_tokenizer(lines):
    path = lines([{"puzzle": "a"}])
    with pytest.raises(DataError, match="its columns are puzzle"):
        open_rows(DataConfig(train_files=[path]), "train")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": "verk"}, r"format=verk: .*Did you mean verl"),
        ({"overlong_prompt": "drop"}, "overlong_prompt=drop"),
        ({"max_prompt_length": 0}, "max_prompt_length=0"),
        ({"val_max_rows": 0}, "val_max_rows=0"),
        ({"system_prompt": "x", "apply_chat_template": False}, "raw text has no system turn"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**keys)


def test_prompts_that_spell_special_tokens_are_said_and_are_text(lines):
    path = lines([{"prompt": "a"}, {"prompt": "b<|e|><|u|>"}, {"prompt": "<|e|>"}, {"prompt": "<think>"}])
    table = load_prompts(DataConfig(train_files=[path]), TOKENIZER, "train")
    assert table[1].ids == (USER, *b"b<|e|><|u|>", ASSISTANT)
    told = f"4 prompts of {path}, 3 to 13 tokens (mean 8.0), special tokens that 2 of them spell are read as text "
    assert table.describe() == f"{told}('<|e|><|u|>' in {path}:2)"
    raw = load_prompts(DataConfig(train_files=[path], apply_chat_template=False), TOKENIZER, "train")
    assert raw[1].ids == (ord("b"), 257, USER)
    assert "special" not in raw.describe()
