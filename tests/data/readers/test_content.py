"""Compressed text files are read like plain ones; what cannot be unpacked is named."""

import gzip
import json
import os

import pytest

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.data.files import open_files
from rlmodule.data.readers.content import Content, Unpacked

ROWS = [{"prompt": f"p{i}", "answer": i} for i in range(300)]
TEXTS = {
    ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    ".json": json.dumps(ROWS),
    ".csv": "prompt,answer\n" + "".join(f"p{i},{i}\n" for i in range(300)),
    ".tsv": "prompt\tanswer\n" + "".join(f"p{i}\t{i}\n" for i in range(300)),
}


@pytest.mark.parametrize("suffix", TEXTS)
def test_a_packed_file_has_the_rows_of_the_plain_one(tmp_path, suffix):
    plain, packed = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}.gz"
    plain.write_text(TEXTS[suffix])
    packed.write_bytes(gzip.compress(TEXTS[suffix].encode()))
    one, other = open_files([str(plain), str(packed)], "data.train_files")
    assert len(one) == len(other) == 300
    assert one.select([299, 7]) == other.select([299, 7])
    assert other.location(7).removeprefix(other.name) == one.location(7).removeprefix(one.name)


def test_a_forked_rank_moves_nobody_elses_position(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(range(100))))
    content = Unpacked(tmp_path / "a.gz")
    file = content.open()
    file.seek(50)
    child = os.fork()
    if child == 0:
        with content.open() as other:
            os._exit(0 if other.read() == bytes(range(100)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert file.read(3) == bytes([50, 51, 52])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x00\x01junk", "not a readable gzip file: Not a gzipped file"),
        (gzip.compress(b"x" * 5000, mtime=0)[:30], "not a readable gzip file: Compressed file ended"),
        (gzip.compress(b"", mtime=0), "holds no rows"),
        (gzip.compress(bytes(range(128, 256)), mtime=0), r"byte 1 \(0x80\) is not valid UTF-8"),
    ],
)
def test_what_cannot_be_unpacked_is_named(tmp_path, content, says):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        open_files([str(tmp_path / "a.jsonl.gz")], "data.train_files")
    assert caught.value.location.startswith(f"{tmp_path}/a.jsonl.gz")


def test_only_text_is_packed(tmp_path):
    for name in ("a.parquet.gz", "a.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"x"))
        with pytest.raises(ConfigError, match=r"is no known kind of data file\. Known: .*\.csv\.gz"):
            open_files([str(tmp_path / name)], "data.train_files")


def test_a_plain_file_is_opened_anew(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    with Content(tmp_path / "a").open() as one, Content(tmp_path / "a").open() as other:
        assert (one.read(1), other.read(1)) == (b"a", b"a")
