"""What ``data.train_files`` names -> tables: files, folders, patterns, saved data sets and data sets of the hub.

A kind of file is a line of ``TEXT`` or ``BINARY`` and a file in ``readers/``. Leaves out what columns mean
(``formats.py``).
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlmodule.core.errors import ConfigError, DataError, in_one_line
from rlmodule.data.readers.arrow_file import is_saved_dataset, open_arrow, saved_files
from rlmodule.data.readers.content import Content, Unpacked
from rlmodule.data.readers.delimited import DelimitedTable
from rlmodule.data.readers.hub import DatasetPlace, cached_files, open_dataset
from rlmodule.data.readers.json_lines import JsonLinesTable, open_json
from rlmodule.data.readers.parquet import ParquetTable
from rlmodule.data.tables import RowTable

Opener = Callable[[Content], RowTable]
TEXT: Mapping[str, Opener] = {
    ".jsonl": JsonLinesTable,
    ".json": open_json,
    ".csv": partial(DelimitedTable, delimiter=","),
    ".tsv": partial(DelimitedTable, delimiter="\t"),
}
BINARY: Mapping[str, Opener] = {".parquet": ParquetTable, ".arrow": open_arrow, ".feather": open_arrow}
PACKED = ".gz"  # behind the suffix of a text file
KNOWN = ", ".join([*TEXT, *BINARY, *(f"{suffix}{PACKED}" for suffix in TEXT)])


@dataclass(frozen=True)
class Origin:
    """How entries of one key are understood.

    Args:
        key: the configuration key that they come from, for errors.
        split, revision: of data sets that name none; an empty revision is the newest.
    """

    key: str
    split: str = "train"
    revision: str = ""


def open_files(entries: Sequence[str], origin: Origin | str) -> list[RowTable]:
    """Open everything that ``entries`` name, in order; see ``open_entry``."""
    origin = Origin(origin) if isinstance(origin, str) else origin
    return [table for entry in entries for table in open_entry(entry, origin)]


def open_entry(entry: str, origin: Origin) -> list[RowTable]:
    """Open what one entry names.

    Args:
        entry: a file, a folder (the data files right in it, by name), a pattern, a folder of ``save_to_disk``, or
            ``organisation/name:config@revision[split]`` of the hub.
        origin: where the entry comes from.

    Raises:
        ConfigError: nothing is there, or it is of no known kind.
        DataError: a file holds no rows, or a line of it is not a row.
        DependencyError: a data set of the hub, and ``datasets`` is not installed.
    """
    files = find_files(entry, origin)
    if files is not None:
        return [_open_file(path, origin.key) for path in files]
    return [_with_rows(open_dataset(DatasetPlace.read(entry, origin.split, origin.revision), origin.key), origin.key)]


def files_behind(entry: str, origin: Origin) -> list[Path]:
    """The files on this disk that hold the rows of ``entry``; raises what ``open_entry`` does."""
    files = find_files(entry, origin)
    return cached_files(DatasetPlace.read(entry, origin.split, origin.revision), origin.key) if files is None else files


def find_files(entry: str, origin: Origin) -> list[Path] | None:
    """The data files that an entry names, in order; None where it is a data set of the hub, or laid out like one.

    Raises:
        ConfigError: nothing is there.
    """
    path = path_of(entry, origin.key)
    if path.is_file():
        return [path]
    if path.is_dir() and not is_saved_dataset(path):
        return _of_folder(path, origin.key)
    place = DatasetPlace.read(entry, origin.split, origin.revision)
    if is_saved_dataset(Path(place.name)):
        return saved_files(Path(place.name), place.split, origin.key, entry)
    matches = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(entry) else []
    found = [Path(match) for match in matches if _opener(Path(match)) is not None and Path(match).is_file()]
    if found:
        return found
    if place.name != entry and Path(place.name).is_dir():
        return None
    if place.may_be_on_hub and _opener(Path(place.name)) is None and not matches:
        return None
    because, fix = "no such file or folder here", "Give a path on a local disk, or ORGANISATION/NAME of the hub"
    if glob.has_magic(entry):
        because = f"no data file matches; {len(matches)} of other kinds do" if matches else "nothing matches"
        fix = f"** stands for folders at any depth, * for any name. Known kinds: {KNOWN}"
    raise ConfigError(key=origin.key, got=entry, because=because, fix=fix)


def path_of(entry: str, key: str) -> Path:
    """The path that an entry may be.

    Raises:
        ConfigError: it is empty, or no path of this system.
    """
    try:
        path = Path(entry) if Path(entry).exists() else Path(entry).expanduser()
        path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long; a home of nobody
        raise ConfigError(
            key=key,
            got=entry[:100],
            because=f"it is no path ({in_one_line(error)[:100]})",
            fix="Give the path of a file",
        ) from None
    if not entry.strip():
        raise ConfigError(key=key, got=repr(entry), because="an entry is empty", fix="Give a path, or take it out")
    return path


def _opener(path: Path) -> Opener | None:
    """What opens a file of this name; None for a kind that is not known."""
    if path.suffix == PACKED:
        inner = TEXT.get(path.with_suffix("").suffix)
        return None if inner is None else lambda content: inner(Unpacked(content.path))
    return TEXT.get(path.suffix) or BINARY.get(path.suffix)


def _open_file(path: Path, key: str) -> RowTable:
    opener = _opener(path)
    if opener is None:
        raise ConfigError(
            key=key,
            got=path,
            because=f"'{''.join(path.suffixes[-2:])}' is no known kind of data file",
            fix=f"Known: {KNOWN}",
        )
    return _with_rows(opener(Content(path)), key)


def _with_rows(table: RowTable, key: str) -> RowTable:
    if len(table) == 0:
        raise DataError(
            location=table.name, because="the file holds no rows", fix=f"Take it out of {key}, or write it again"
        )
    return table


def _of_folder(folder: Path, key: str) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and _opener(path) is not None)
    if not files:
        deeper = any(_opener(path) is not None for path in folder.rglob("*"))
        raise ConfigError(
            key=key,
            got=folder,
            because="the folder holds no data file" + (", only folders that do" if deeper else ""),
            fix=f"Use {key}=['{folder}/**/*'] for files at any depth" if deeper else f"Known kinds: {KNOWN}",
        )
    return files
