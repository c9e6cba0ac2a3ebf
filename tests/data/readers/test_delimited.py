"""Tables with a header line: values come back as they were written, and a bad row is named."""

import csv
import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.core.errors import DataError
from rlmodule.data.files import open_files

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"), min_size=1, max_size=8)
plain_words = words.filter(lambda word: not word.startswith("["))


def read(path):
    [table] = open_files([str(path)], "data.train_files")
    return table


@given(
    rows=st.lists(st.tuples(plain_words, plain_words), min_size=1, max_size=6), separator=st.sampled_from([",", "\t"])
)
def test_what_is_written_is_read(tmp_path_factory, rows, separator):
    """Separators, quotes and line breaks inside values included; rows are found by position."""
    path = tmp_path_factory.mktemp("rows") / {",": "rows.csv", "\t": "rows.tsv"}[separator]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows([("prompt", "answer"), *rows])
    table, expected = read(path), [{"prompt": a, "answer": b} for a, b in rows]
    assert [row for batch in table.batches(["prompt"]) for row in batch] == expected
    assert table.select(range(len(rows))[::-1]) == expected[::-1]


def test_lines_of_rows_are_counted_in_the_file(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"two\r\nlines",1\r\n\r\nlast,2')
    table = read(tmp_path / "a.csv")
    assert table.columns == ("prompt", "answer")
    assert table.select([1, 0]) == [{"prompt": "last", "answer": "2"}, {"prompt": "two\r\nlines", "answer": "1"}]
    assert [table.location(row) for row in (0, 1)] == [f"{tmp_path}/a.csv:2", f"{tmp_path}/a.csv:5"]


def test_an_empty_value_is_none_and_a_column_without_a_name_has_a_number(tmp_path):
    (tmp_path / "a.csv").write_text(",prompt,answer\n0,a,\n")  # pandas writes its index so
    assert read(tmp_path / "a.csv").select([0]) == [{"column 1": "0", "prompt": "a", "answer": None}]


def test_a_conversation_is_json_in_its_cell(tmp_path):
    (tmp_path / "a.csv").write_text('messages,note\n"[{""role"": ""user"", ""content"": ""hi""}]","[{x"\n')
    assert read(tmp_path / "a.csv").select([0]) == [{"messages": [{"role": "user", "content": "hi"}], "note": "[{x"}]


def test_a_long_document_is_a_value(tmp_path):
    (tmp_path / "a.csv").write_text(f"prompt\n{'x' * 200_000}\n")
    assert len(read(tmp_path / "a.csv").select([0])[0]["prompt"]) == 200_000


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("a,b\n" + "1,2\n" * 5 + "1,2,3\n", 7, "the row has 3 values and the header names 2 columns"),
        ("a,b\n1\n", 2, "the row has 1 values"),
        ('a,b\n1,"open\n2,3\n', 2, "not a row of values: unexpected end of data"),
        ('a,b\n1,"x"y\n', 2, "not a row of values"),
        ("a,a\n1,2\n", 1, "two columns are called 'a'"),
        ("prompt;answer\n1;2\n", 1, "a single column 'prompt;answer', which holds ';'"),
        ("messages\n\"[{'role': 'user'}]\"\n", 2, "turns as Python prints them"),
        (b"a,b\n1,2\n\xff,3\n", 3, r"byte 1 \(0xff\) is not valid UTF-8"),
        ("", None, "holds no rows"),
        ("a,b\n", None, "holds no rows"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_row_is_named(tmp_path, content, line, says, packed):
    path = tmp_path / ("rows.csv.gz" if packed else "rows.csv")
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=says) as caught:
        read(path)
    assert caught.value.location == (str(path) if line is None else f"{path}:{line}")
