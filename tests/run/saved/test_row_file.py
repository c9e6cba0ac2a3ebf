"""A file of lines that survives a kill: whole lines stay, half ones go, one process writes, settings stay the same."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.run.saved.row_file import RowFile

SETTINGS = {"seed": 0, "files": ["a", "b"]}


@pytest.mark.parametrize("rest", [b"", b'{"sample_id": 7', b'{"sample_id": 7}', b"\xff\xfe", b"{}\n", b"[1]\n", b"\n"])
def test_whole_lines_stay_and_whatever_else_goes(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "deep" / "out.jsonl"
    with closing(RowFile.open(path, SETTINGS)) as file:
        for sample_id in (3, 1):
            file.append({"sample_id": sample_id, "text": "two\nlines €\ud800"})
    with path.open("ab") as out:
        out.write(rest)
    with closing(RowFile.open(path, SETTINGS)) as file:
        assert file.done == {1, 3}
        file.append({"sample_id": 2})
        file.finish()
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [row["sample_id"] for row in rows] == [1, 2, 3]
    assert {entry.name for entry in path.parent.iterdir()} == {"out.jsonl", "out.jsonl.settings.json"}


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with closing(RowFile.open(path, SETTINGS)):
        child = os.fork()
        if child == 0:
            try:
                RowFile.open(path, SETTINGS)
            except ConfigError as error:
                os._exit(0 if "another process is writing it" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_other_settings_and_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with closing(RowFile.open(path, SETTINGS)) as file:
        file.append({"sample_id": 0})
    with pytest.raises(ConfigError, match=r"begun with other settings \(new was None, is 1; seed was 0, is 5\)"):
        RowFile.open(path, {**SETTINGS, "seed": 5, "new": 1})
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(ConfigError, match=r"out.jsonl.settings.json is missing or damaged"):
        RowFile.open(path, SETTINGS)
    with pytest.raises(TrainingError, match=r"cannot be written"):
        RowFile.open(path / "below.jsonl", SETTINGS)
