"""Bytes of one text file, opened anew whenever rows are read; compressed ones are unpacked to disk once.

Leaves out what the bytes mean (``json_lines.py``, ``delimited.py``).
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tempfile
import weakref
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from rlmodule.core.errors import DataError

UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Content:
    """A file as it lies on disk."""

    path: Path

    def open(self) -> BinaryIO:
        """Its bytes from the beginning, with a position of their own."""
        return self.path.open("rb")


@dataclass(frozen=True)
class Unpacked(Content):
    """A .gz file, unpacked into a file without a name in the folder for temporary files (``TMPDIR``).

    Rows are read by position, which a compressed file does not know. The copy is gone with the process.

    Raises:
        DataError: the file cannot be unpacked.
    """

    _copy: IO[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        copy = tempfile.TemporaryFile(prefix="rlmodule-")
        object.__setattr__(self, "_copy", copy)
        weakref.finalize(self, copy.close)
        try:
            with gzip.open(self.path) as packed:
                shutil.copyfileobj(packed, copy, 1 << 20)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(
                location=self.path, because=f"not a readable gzip file: {error}", fix="Write the file again"
            ) from None
        copy.flush()

    def open(self) -> BinaryIO:
        """Likewise; ranks that were forked share the copy and no position in it."""
        return io.BufferedReader(_Positioned(self._copy.fileno()))


class _Positioned(io.RawIOBase):
    """Reads an open file at a position that no other reader moves."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._position = descriptor, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: os.fstat(self._descriptor).st_size}
        self._position = start[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        found = os.pread(self._descriptor, len(buffer), self._position)
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)
