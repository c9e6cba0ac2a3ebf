"""A file of JSON lines that grows by whole lines and can be killed at any moment; the next start goes on with it.

Beside it lies ``FILE.settings.json``: what its lines depend on, so that no file is gone on with under other settings.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.records.metrics_log import atomic_write
from rlmodule.records.rows import json_line

KEY = "command.out"
ID = "sample_id"  # names a line
SHORT = 40  # characters of a value that a message shows; digests are longer


@dataclass(eq=False)
class RowFile:
    """The file, open for this process alone.

    Args:
        path: of the file.
        descriptor: of the lock beside it, which the process holds.
        done: ids of the lines that are there.
    """

    path: Path
    descriptor: int
    done: set[int] = field(default_factory=set)
    _file: int = field(default=-1, init=False)

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any]) -> RowFile:
        """Begin the file, or go on with it.

        Raises:
            ConfigError: it is another command's, has other settings, or another process writes it.
            TrainingError: it cannot be written.
        """
        path = path.absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            made = cls(path, _opened(path, settings))
            made._keep_whole_lines()
        except OSError as error:
            raise _cannot_write(path, error) from error
        return made

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line; it is whole in the file, or not there at all but for a rest that the next start cuts off.

        Raises:
            TrainingError: it cannot be written.
        """
        rest = memoryview(json_line(row, default=str))
        try:
            while rest:  # a disk that fills up takes a part
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self.done.add(int(row[ID]))

    def finish(self) -> None:
        """Put the lines into the order of their ids.

        Raises:
            TrainingError: it cannot be written.
        """
        places = sorted((row_id, start, length) for row_id, start, length in _lines(self.path))
        try:
            with atomic_write(self.path) as aside, self.path.open("rb") as source, aside.open("wb") as target:
                for _, start, length in places:
                    source.seek(start)
                    target.write(source.read(length))
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def close(self) -> None:
        """Let other processes have the file."""
        os.close(self._file)
        os.close(self.descriptor)

    def _keep_whole_lines(self) -> None:
        """Take away what a dying process has left half written."""
        found = {row_id: (start, length) for row_id, start, length in _lines(self.path)}
        whole = sum(length for _, length in found.values())
        if self.path.exists() and self.path.stat().st_size != whole:
            with atomic_write(self.path) as aside, self.path.open("rb") as source, aside.open("wb") as target:
                for start, length in found.values():
                    source.seek(start)
                    target.write(source.read(length))
        self.done = set(found)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _lines(path: Path) -> Iterator[tuple[int, int, int]]:
    """(id, first byte, bytes) of every whole line."""
    if not path.exists():
        return
    start = 0
    with path.open("rb") as file:
        for line in file:
            try:
                row_id = int(json.loads(line)[ID]) if line.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError):
                row_id = None
            if row_id is not None:
                yield row_id, start, len(line)
            start += len(line)


def _opened(path: Path, settings: Mapping[str, Any]) -> int:
    """The settings beside the file, written where the file begins and the same as before where it goes on; locked.

    The lock is on the settings, which are never replaced by another file; it is freed when the process dies.

    Raises:
        ConfigError: the file was made by something else or with other settings, or another process writes it.
    """
    beside = path.with_name(f"{path.name}.settings.json")
    is_new = not path.exists() or path.stat().st_size == 0
    if not is_new and not beside.is_file():
        raise _not_ours(path, beside)
    descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(path, descriptor)
        now = json.loads(json.dumps(dict(settings), default=str))
        if is_new:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, (json.dumps(now, indent=1) + "\n").encode())
        else:
            _check_same(path, beside, now)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise ConfigError(
            key=KEY, got=path, because="another process is writing it", fix="Wait for it, or use another file"
        ) from None


def _check_same(path: Path, beside: Path, now: Mapping[str, Any]) -> None:
    try:
        before = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise _not_ours(path, beside)
    changed = [name for name in sorted({*now, *before}) if now.get(name) != before.get(name)]
    if changed:
        shown = [n if len(str(now.get(n))) > SHORT else f"{n} was {before.get(n)}, is {now.get(n)}" for n in changed]
        raise ConfigError(
            key=KEY,
            got=path,
            because=f"it was begun with other settings ({'; '.join(shown)})",
            fix="Give the settings that it was begun with, or another file",
        )


def _not_ours(path: Path, beside: Path) -> ConfigError:
    return ConfigError(
        key=KEY,
        got=path,
        because=f"something is there that cannot be gone on with, as {beside.name} is missing or damaged",
        fix="Use another file",
    )


def _cannot_write(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"{path}: it cannot be written ({error.strerror or error}). Free some space, or give another command.out; the "
        "same command goes on where this one stopped"
    )
