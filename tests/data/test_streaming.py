"""Memory does not grow with the size of a file: rows are read when they are needed. Measured in processes of their own."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

ROOT = Path(__file__).parents[2]
ROWS, SMALL, LARGE = 1000, 1_000, 40_000  # characters of a row: 1 MB and 40 MB of text

# What a run does with its rows beside encoding them: open and check them all, go through them, then draw some.
READ = """
import json, sys
from rlmodule.data.config import DataConfig
from rlmodule.data.rows import open_rows
from rlmodule.data.tables import in_batches
def resident():  # kB that belong to the process; pages of mapped files belong to the disk
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
before = resident()
rows = open_rows(DataConfig(train_files=[sys.argv[1]]), "train")
count = sum(len(row.completion) for batch in in_batches(len(rows)) for row in rows.select(batch))
drawn = [(row.prompt, len(row.completion)) for row in rows.select([999, 3])]
print(json.dumps({"count": count, "drawn": drawn, "kB": resident() - before}))
"""


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_packed(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), 1))


def write_csv(path, rows):
    path.write_text("prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in rows))


def write_arrow(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
@pytest.mark.parametrize(
    ("name", "write"),
    [("a.jsonl", write_lines), ("a.jsonl.gz", write_packed), ("a.csv", write_csv), ("a.arrow", write_arrow)],
)
def test_forty_times_the_text_takes_no_more_memory(tmp_path, name, write):
    held = []
    for length in (SMALL, LARGE):
        path = tmp_path / name
        write(path, [{"prompt": f"p{i}", "completion": "x" * (length + i % 7)} for i in range(ROWS)])
        child = subprocess.run(
            [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, cwd=ROOT, check=True
        )
        found = json.loads(child.stdout)
        assert found["drawn"] == [["p999", length + 999 % 7], ["p3", length + 3]]
        held.append(found["kB"] / 1024)
    assert held[1] - held[0] < 20, f"{held} MB held, of 1 and 40 MB of text"
