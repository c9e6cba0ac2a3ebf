"""Arrow files in both of their formats, and folders of ``save_to_disk``, read as Python's values by position."""

import datasets
import pyarrow as pa
import pytest
from pyarrow import feather

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.data.files import Origin, open_entry, open_files
from rlmodule.data.tables import BATCH_ROWS

ROWS = [{"prompt": [{"role": "user", "content": f"p{i}"}], "level": i / 10} for i in range(2 * BATCH_ROWS + 3)]
TABLE = pa.Table.from_pylist(ROWS)


def stream(path):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=100)


def file(path):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=100)


def packed(path):
    feather.write_feather(TABLE, str(path), compression="lz4", chunksize=100)


@pytest.mark.parametrize(("name", "write"), [("a.arrow", stream), ("a.arrow", file), ("a.feather", packed)])
def test_rows_come_back(tmp_path, name, write):
    write(tmp_path / name)
    [table] = open_files([str(tmp_path)], "data.train_files")
    assert table.select([258, 3, 150]) == [ROWS[258], ROWS[3], ROWS[150]]
    assert [row["level"] for batch in table.batches(["level"]) for row in batch] == [row["level"] for row in ROWS]
    assert table.location(3) == f"{tmp_path}/{name}:4"


@pytest.mark.parametrize("content", [b"", b"ARROW1 and no more", b"\x00" * 40, b"junk"])
def test_what_is_no_arrow_file_is_named(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.arrow: (not a readable Arrow file|the file holds no rows)"):
        open_files([str(tmp_path / "a.arrow")], "data.train_files")


def test_a_saved_data_set_is_its_arrow_files(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one", num_shards=2)
    tables = open_entry(str(tmp_path / "one"), Origin("data.train_files"))
    assert [row for table in tables for row in table.select(range(len(table)))] == ROWS
    (tmp_path / "odd").mkdir()
    for name, content in (("state.json", "{}"), ("dataset_info.json", "{}")):
        (tmp_path / "odd" / name).write_text(content)
    with pytest.raises(ConfigError, match=r"state\.json is not what save_to_disk writes \(KeyError"):
        open_entry(str(tmp_path / "odd"), Origin("data.train_files"))
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data-00001-of-00002\.arrow is missing"):
        open_entry(str(tmp_path / "one"), Origin("data.train_files"))


def test_of_several_saved_splits_one_is_named(tmp_path):
    parts = {name: datasets.Dataset.from_list(ROWS[:count]) for name, count in (("train", 5), ("validation", 2))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "all")
    [train] = open_entry(str(tmp_path / "all"), Origin("data.train_files"))
    [held_out] = open_entry(f"{tmp_path}/all[validation]", Origin("data.val_files", split="test"))
    assert (len(train), len(held_out)) == (5, 2)
    with pytest.raises(ConfigError, match="the data set has no split 'test'; it has train, validation"):
        open_entry(str(tmp_path / "all"), Origin("data.val_files", split="test"))
