"""Data sets of the Hugging Face hub, and folders laid out like one there, through ``datasets``: its cache is mapped.

Leaves out streaming over the network: a data set is on this disk before a run begins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode

from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.core.hub import prefer_cache_if_unreachable
from rlmodule.data.readers.arrow_file import arrow_rows
from rlmodule.data.tables import RowTable

_PLACE = re.compile(
    r"(?P<name>.+?)(?::(?P<config>[\w.+-]+))?(?:@(?P<revision>[\w./-]+))?"
    r"(?:\[(?P<split>[^\[\]]+(?:\[[^\[\]]*\])?)\])?"
)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class DatasetPlace:
    """``name:config@revision[split]``, of which all but the name may be missing.

    Args:
        given: as it was written.
        name: on the hub, or a folder.
        config: one of the data set's own parts; empty for the only one.
        revision: branch, tag or commit; empty for the newest.
        split: ``train``, ``test``, or a part of one: ``train[:100]``, ``train[10%:20%]``.
    """

    given: str
    name: str
    config: str
    revision: str
    split: str

    @classmethod
    def read(cls, given: str, split: str, revision: str) -> DatasetPlace:
        """Take ``given`` apart; ``split`` and ``revision`` stand for what it does not say."""
        found = _PLACE.fullmatch(given)
        parts = found.groupdict() if found else {"name": given}
        return cls(
            given,
            str(Path(parts["name"]).expanduser()) if parts["name"].startswith("~") else parts["name"],
            parts.get("config") or "",
            parts.get("revision") or revision,
            parts.get("split") or split,
        )

    @property
    def may_be_on_hub(self) -> bool:
        """Whether the name has the form ``organisation/data-set``."""
        return _HUB_NAME.fullmatch(self.name) is not None


def open_dataset(place: DatasetPlace, key: str) -> RowTable:
    """The rows of one split.

    Raises:
        ConfigError: there is no such data set, config or split, or the hub cannot be reached and the cache lacks it.
        DependencyError: ``datasets`` is not installed.
    """
    return arrow_rows(place.given, _load(place, key).data.table)


def cached_files(place: DatasetPlace, key: str) -> list[Path]:
    """The files on this disk that hold the split; raises what ``open_dataset`` does."""
    return [Path(file["filename"]) for file in _load(place, key).cache_files]


def _load(place: DatasetPlace, key: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DependencyError(package="datasets", needed_by=f"{key}={place.given}", extra="hub") from None
    prefer_cache_if_unreachable(place.name)
    datasets.config.HF_HUB_OFFLINE = is_offline_mode()  # it asks once, when it is imported
    datasets.logging.set_verbosity_error()  # a data set that is taken from the cache is no news
    if Path(place.name).is_dir():
        place = replace(place, name=str(Path(place.name).absolute()))
    try:
        loaded = datasets.load_dataset(
            place.name, place.config or None, revision=place.revision or None, split=place.split
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _error(place, key, error) from None
    assert isinstance(loaded, datasets.Dataset), "one split was asked for"
    _check_revision(place, key, {Path(file["filename"]).parent.name for file in loaded.cache_files})
    return loaded


def _check_revision(place: DatasetPlace, key: str, cached: set[str]) -> None:
    """Without the hub ``datasets`` takes what its cache holds, whatever revision was asked for."""
    if place.revision and is_offline_mode() and not Path(place.name).is_dir() and place.revision not in cached:
        raise ConfigError(
            key=key,
            got=place.given,
            because=f"the hub cannot be reached, and its cache holds revision {', '.join(sorted(cached))} and not "
            f"{place.revision}",
            fix="Name the revision that is there, or none",
        )


def _error(place: DatasetPlace, key: str, error: Exception) -> ConfigError:
    said = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    where, fix = "", f"Write {key}=['NAME:CONFIG@REVISION[SPLIT]'], or set data.split and data.revision"
    if isinstance(error, OSError) and is_offline_mode() and not Path(place.name).is_dir():
        where = "no such file or folder here, the hub cannot be reached, and its cache lacks the data set: "
        fix = "Give files on a local disk, or load it once where the hub can be reached and bring HF_HOME along"
    elif isinstance(error, OSError) and not Path(place.name).is_dir():
        where = "no such file or folder here, and nothing that can be read on the hub: "
        fix = "Check the spelling; a private data set needs HF_TOKEN"
    return ConfigError(key=key, got=place.given, because=where + said, fix=fix)
