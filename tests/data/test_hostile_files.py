"""Files and values that a stranger brings: read as they were meant, or refused with file, place and reason."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.data.config import DataConfig
from rlmodule.data.files import open_files
from rlmodule.data.formats import ColumnKeys
from rlmodule.data.prompts import load_prompts
from rlmodule.data.rollouts import load_rollouts
from rlmodule.data.rows import RowSource
from rlmodule.models.byte_tokenizer import byte_tokenizer

ROW = {"prompt": "2+3", "answer": "5"}
TURNS = [{"role": "user", "content": "hi"}]


def rows_of(path, content=None):
    """What a file says, read in both ways."""
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = RowSource([open_files([str(path)], "data.train_files")], "auto", ColumnKeys())
    assert [row.prompt for batch in source.prompts() for row in batch] == [
        row.prompt for row in source.select(range(len(source)))
    ]
    return source.select(range(len(source)))


def line(**row):
    return json.dumps({**ROW, **row}) + "\n"


def test_files_that_were_joined_may_each_begin_with_a_mark(tmp_path):
    rows = rows_of(tmp_path / "a.jsonl", ("\ufeff" + line() + "\ufeff" + line(prompt="1+1")).encode())
    assert [row.prompt for row in rows] == ["2+3", "1+1"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", json.dumps({"data": [ROW]}, indent=1), "single JSON object over several lines, with lists under data"),
        ("a.json", json.dumps(ROW, indent=1), r"a\.json: it is a single JSON object over several lines\. Write the rows"),
        ("a.json", '{"prompt": "a"}\n{"prompt": \n', r"a\.json:2: not valid JSON"),
        ("a.csv", "prompt,answer\ra,1\r", "a carriage return stands in it.*Save the file with line feeds"),
        ("a.jsonl", line(meta="[" * 50_000, source="s"), r"a\.jsonl:1: column 'meta' is not JSON: it is nested too deeply"),
        ("a.jsonl", line(tools="[" * 50_000), r"a\.jsonl:1: column 'tools': tools are a list"),
        ("a.jsonl", line(prompt=[{"role": "user", "text": "hi"}]), "turn 1 must have a text as content.*; it has role, text"),
        ("a.jsonl", line(prompt="[{'role': 'user', 'content': 'hi'}]"), "it holds turns as Python prints them, not as JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, name, content, says):
    with pytest.raises(DataError, match=says):
        rows_of(tmp_path / name, content)


def test_json_texts_are_what_they_say(tmp_path):
    """Tools, conversations and nested columns that went through a table of texts."""
    told = json.dumps({"ground_truth": "5"})
    rows = rows_of(
        tmp_path / "a.jsonl", line(prompt=json.dumps(TURNS), data_source="s", reward_model=told, tools="null")
    )
    assert rows[0].prompt == TURNS
    assert rows[0].answer == "5"
    assert rows[0].tools is None
    [plain] = rows_of(tmp_path / "b.jsonl", line(prompt='[{"a": 1}]'))
    assert plain.prompt == '[{"a": 1}]', "JSON that is no conversation stays a text"


def test_nulls_among_right_answers_are_none(tmp_path):
    """As one text of JSON no response could ever equal it."""
    first, second = rows_of(tmp_path / "a.jsonl", line(answer=["a", None]) + line(answer=[None]))
    assert first.answer_value == ["a"]
    assert second.answer is None


def damaged(path):
    pq.write_table(
        pa.table({"prompt": [f"p{i}" * 50 for i in range(500)]}), path, compression="zstd", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 4 : len(content) // 4 + 400] = bytes(400)
    path.write_bytes(content)


def no_utf8():
    ends = pa.py_buffer(np.array([0, 2, 4], dtype=np.int32).tobytes())
    return pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"\xff\xfeok")])


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (no_utf8(), "UnicodeDecodeError"),
        (pa.array([0, 1], pa.timestamp("us", tz="Mars/Olympus")), "Olympus"),
        (pa.array([2**62, 1], pa.timestamp("us")), "OverflowError"),
        (pa.array([2**62, 1], pa.duration("s")), "OverflowError"),
    ],
)
def test_a_value_of_parquet_that_python_lacks_names_its_column(tmp_path, column, says):
    pq.write_table(pa.table({"prompt": ["a", "b"], "other": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet: a value of column 'other' cannot be read \(.*{says}"):
        rows_of(tmp_path / "a.parquet")


def test_damage_inside_of_a_parquet_file_is_told_in_words(tmp_path):
    damaged(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: its rows are damaged \("):
        rows_of(tmp_path / "a.parquet")


def test_two_columns_of_one_name_are_refused(tmp_path):
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="two columns are called 'prompt'"):
        rows_of(tmp_path / "a.parquet")


def test_half_floats_are_the_numbers_that_were_meant(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"], "answer": pa.array([np.float16(0.1)])}), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet")[0].answer == "0.1"


@pytest.mark.parametrize("entry", ["", " ", "x" * 300 + ".jsonl", "~nobody-of-this-name/a.jsonl"])
def test_an_entry_that_is_no_path_is_refused(entry):
    with pytest.raises(ConfigError, match=r"data\.train_files="):
        load_prompts(DataConfig(train_files=[entry]), byte_tokenizer(), "train")


def test_a_file_may_be_called_as_a_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~mine.jsonl").write_text(line())
    assert len(load_prompts(DataConfig(train_files=["~mine.jsonl"]), byte_tokenizer(), "train")) == 1


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ('"logprobs": [-1e300, -1]', "a number of at most 0 that float32 can hold"),
        (f'"logprobs": [-1{"0" * 400}, -1]', "'logprobs' must be a list of numbers"),
        ('"logprobs": ["-1", "-1"]', "'logprobs' must be a list of numbers"),
        ('"sampling": {"temperature": 1, "top_k": Infinity, "top_p": 1}', "must hold temperature, top_k and top_p"),
        (f'"reward": 1{"0" * 400}', "no row has a finite reward"),
    ],
)
def test_numbers_of_stored_responses_that_are_none(tmp_path, column, says):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt_ids": [1], "response_ids": [2, 3], "reward": 1, ' + column + "}\n")
    with pytest.raises(DataError, match=says):
        load_rollouts(str(path), DataConfig(), byte_tokenizer(), 260)
