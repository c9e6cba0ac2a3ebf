""".arrow and .feather files, and folders that ``datasets`` has written with ``save_to_disk``: mapped, not read.

Uncompressed files stay on disk until a row is needed. Of compressed ones the batch that holds the row is unpacked, but
a compressed stream (which ``datasets`` does not write) is unpacked as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlmodule.core.errors import ConfigError, DataError, in_one_line
from rlmodule.data.readers.content import Content
from rlmodule.data.readers.row_groups import RowGroups
from rlmodule.data.tables import RowTable

_FILE_MARK = b"ARROW1"  # how the file format begins; the stream format has no mark
_ONE, _SEVERAL = "state.json", "dataset_dict.json"  # what a saved data set has, and one of several splits


def open_arrow(content: Content) -> RowTable:
    """A file in either of Arrow's formats.

    Raises:
        DataError: it cannot be read.
    """
    name = str(content.path)
    with content.open() as file:
        is_file_format = file.read(len(_FILE_MARK)) == _FILE_MARK
    try:
        mapped = pa.memory_map(name)
        if not is_file_format:
            return arrow_rows(name, pa.ipc.open_stream(mapped).read_all())
        reader = pa.ipc.open_file(mapped)
        groups = range(reader.num_record_batches)
        sizes = [reader.get_batch(group).num_rows for group in groups]
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            location=name, because=f"not a readable Arrow file: {error}", fix="Write the file again"
        ) from None

    def read(group: int, columns: Sequence[str] | None) -> pa.RecordBatch:
        batch = reader.get_batch(group)
        return batch if columns is None else batch.select(columns)

    return RowGroups(name, reader.schema, sizes, read)


def arrow_rows(name: str, table: pa.Table) -> RowTable:
    """The rows of a table that is mapped into memory."""
    batches = table.to_batches()

    def read(group: int, columns: Sequence[str] | None) -> pa.RecordBatch:
        return batches[group] if columns is None else batches[group].select(columns)

    return RowGroups(name, table.schema, [batch.num_rows for batch in batches], read)


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` has written the folder."""
    return (folder / _SEVERAL).is_file() or ((folder / _ONE).is_file() and (folder / "dataset_info.json").is_file())


def saved_files(folder: Path, split: str, key: str, given: str) -> list[Path]:
    """The .arrow files of a saved data set, or of one split where it has several.

    Args:
        folder: that holds it.
        split: its name.
        key, given: configuration key and value, for errors.

    Raises:
        ConfigError: there is no such split, or a file is missing.
    """
    if (folder / _SEVERAL).is_file():
        known = _entry(folder / _SEVERAL, "splits", key, given)
        if split not in known:
            raise ConfigError(
                key=key,
                got=given,
                because=f"the data set has no split '{split}'; it has {', '.join(known)}",
                fix=f"Use {key}=['{folder}[{known[0]}]']",
            )
        folder = folder / split
    files = [folder / str(entry["filename"]) for entry in _entry(folder / _ONE, "_data_files", key, given)]
    for file in files:
        if not file.is_file():
            raise ConfigError(key=key, got=given, because=f"{file} is missing", fix="Save the data set again")
    return files


def _entry(path: Path, name: str, key: str, given: str) -> list[Any]:
    """The list under ``name`` in a file of ``save_to_disk``."""
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        because = f"{path} is not what save_to_disk writes ({in_one_line(error)})"
        raise ConfigError(key=key, got=given, because=because, fix="Save the data set again") from None
