"""Laws of file tables: rows come back by position, in file order, and every error says where."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.data.files import open_files
from rlmodule.data.tables import BATCH_ROWS, MemoryTable, TableChain

ROWS = [{"prompt": f"p{i}", "extra": {"index": i}} for i in range(2 * BATCH_ROWS + 3)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_array(path, rows):
    path.write_text(json.dumps(rows, indent=1))


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)


kinds = pytest.mark.parametrize(
    ("suffix", "write"),
    [(".jsonl", write_lines), (".json", write_lines), (".json", write_array), (".parquet", write_parquet)],
)


@kinds
def test_rows_come_back_in_file_order_and_by_position(tmp_path, suffix, write):
    path = tmp_path / f"rows{suffix}"
    write(path, ROWS)
    [table] = open_files([str(path)], "data.train_files")
    assert len(table) == len(ROWS)
    assert table.columns == ("prompt", "extra")
    assert [row for batch in table.batches(["prompt", "extra"]) for row in batch] == ROWS
    wanted = [150, 3, 258, 3, 0]
    assert table.select(wanted) == [ROWS[index] for index in wanted]
    assert table.location(150) == f"{path}:151"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
blank_lines = st.lists(st.sampled_from(["", "  ", "\t"]), max_size=2)


@given(
    rows=st.lists(st.dictionaries(st.text(), json_values, max_size=3), min_size=1, max_size=6),
    blanks=st.lists(blank_lines, min_size=7, max_size=7),
    line_end=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
    ascii_only=st.booleans(),
    ends_with_line_end=st.booleans(),
)
def test_json_lines_are_read_whatever_their_dress(
    tmp_path_factory, rows, blanks, line_end, mark, ascii_only, ends_with_line_end
):
    lines, numbers = [], []
    for before, row in zip(blanks, rows, strict=False):
        lines += [*before, json.dumps(row, ensure_ascii=ascii_only)]
        numbers.append(len(lines))
    content = mark + line_end.join([*lines, *blanks[-1]]) + line_end * ends_with_line_end
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(content.encode())
    [table] = open_files([str(path)], "data.train_files")
    assert table.select(range(len(table))) == rows
    assert [table.location(row) for row in range(len(rows))] == [f"{path}:{number}" for number in numbers]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'{"a": 1}\n\n{"a": \n', 3, "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}\n{"a": "\xff"}\n', 2, r"byte 8 \(0xff\) is not valid UTF-8"),
        (b"\xff\xfe{\x00}\x00", 1, "not valid UTF-8"),
        (b'{"a": 1}\n[1]\n', 2, "must be a JSON object, this is of type list"),
        (b'{"a": 1}\n{"a": 2} {"a": 3}\n', 2, "Extra data at column 10"),
        (b'{"a": ' + b"[" * 100_000 + b"\n", 1, "cannot be read"),
        (b'{"a": ' + b"1" * 5000 + b"}\n", 1, "cannot be read"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        open_files([str(path)], "data.train_files")
    assert caught.value.location == f"{path}:{line}"


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", b"\n \n"), ("a.json", b"[]"), ("a.jsonl", b"")])
def test_a_file_without_rows_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="holds no rows") as caught:
        open_files([str(tmp_path / name)], "data.train_files")
    assert caught.value.location == str(tmp_path / name)


def test_a_parquet_file_without_rows_or_sense_is_refused(tmp_path):
    empty, broken = tmp_path / "empty.parquet", tmp_path / "broken.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="holds no rows"):
        open_files([str(empty)], "data.val_files")
    with pytest.raises(DataError, match=r"broken\.parquet: not a readable parquet file"):
        open_files([str(broken)], "data.val_files")


def test_an_array_names_its_bad_element(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}, 2]')
    with pytest.raises(DataError, match="this is of type int") as caught:
        open_files([str(path)], "data.train_files")
    assert caught.value.location == f"{path}:2"


def test_a_folder_stands_for_its_data_files_by_name(tmp_path):
    for name in ("b.jsonl", "a.parquet", "notes.txt"):
        (tmp_path / name).write_text("")
    write_lines(tmp_path / "b.jsonl", ROWS[:1])
    write_parquet(tmp_path / "a.parquet", ROWS[:1])
    tables = open_files([str(tmp_path)], "data.train_files")
    assert [Path(table.name).name for table in tables] == ["a.parquet", "b.jsonl"]


def test_a_pattern_stands_for_every_data_file_that_matches(tmp_path):
    for name in ("a/x.jsonl", "a/b/y.jsonl", "z.jsonl", "a/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(tmp_path / name, ROWS[:1])
    at_any_depth = open_files([f"{tmp_path}/**/*"], "data.train_files")
    assert [Path(table.name).name for table in at_any_depth] == ["y.jsonl", "x.jsonl", "z.jsonl"], "by path"
    assert [Path(table.name).name for table in open_files([f"{tmp_path}/[yz].jsonl"], "data.train_files")] == [
        "z.jsonl"
    ]


def test_a_long_list_of_files_is_named_in_short():
    tables = [MemoryTable(f"part-{i}.jsonl", ROWS[:1]) for i in range(9)]
    assert TableChain(tables).name == "part-0.jsonl, part-1.jsonl and 7 more"
    assert TableChain(tables[:2]).name == "part-0.jsonl, part-1.jsonl"


def test_paths_that_cannot_work_name_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.val_files=/absent: no such file or folder here"):
        open_files(["/absent"], "data.val_files")
    with pytest.raises(ConfigError, match=r"data\.val_files=owner/rows\.jsonl: no such file or folder here"):
        open_files(["owner/rows.jsonl"], "data.val_files")
    with pytest.raises(ConfigError, match=r"the folder holds no data file\. Known kinds"):
        open_files([str(tmp_path)], "data.val_files")
    with pytest.raises(ConfigError, match=r"\*\.jsonl: nothing matches\. \*\* stands for folders at any depth"):
        open_files([f"{tmp_path}/*.jsonl"], "data.val_files")
    (tmp_path / "rows.xlsx").write_text("a\n")
    with pytest.raises(ConfigError, match=r"'\.xlsx' is no known kind of data file\. Known: \.jsonl"):
        open_files([str(tmp_path / "rows.xlsx")], "data.val_files")
    with pytest.raises(ConfigError, match="no data file matches; 1 of other kinds do"):
        open_files([f"{tmp_path}/*"], "data.val_files")
    (tmp_path / "deep").mkdir()
    write_lines(tmp_path / "deep" / "rows.jsonl", ROWS[:1])
    with pytest.raises(ConfigError, match=r"only folders that do\. Use data\.val_files=\['.*/\*\*/\*'\]"):
        open_files([str(tmp_path)], "data.val_files")
