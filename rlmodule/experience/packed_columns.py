"""Columns of numbers in few bytes, for the way to other ranks; they come out as they went in, bit for bit.

A column of equal numbers is one number, whole numbers are sent as what they exceed the least one by in as few bytes as
that needs, and floats in four bytes where those say the same. Leaves out the exchange (``gathering.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]

EQUAL = "="  # code of a column whose numbers are all its base; other codes are numpy's letters for what is sent


@dataclass(frozen=True)
class PackedColumns:
    """Columns of equal length.

    Args:
        size: numbers in a column.
        names: of the columns.
        dtypes: numpy's letter for each: ``?``, ``i``, ``q`` or ``d``.
        codes: what each is sent as, ``EQUAL`` or a letter.
        bases: what is added to each.
        data: what is sent of all, one column after the other.
    """

    size: int
    names: tuple[str, ...]
    dtypes: str
    codes: str
    bases: tuple[float, ...]
    data: bytes

    @classmethod
    def of(cls, columns: Mapping[str, Column]) -> PackedColumns:
        """Pack columns, each [n] bool, int32, int64 or float64."""
        packed = [_packed(column) for column in columns.values()]
        return cls(
            len(next(iter(columns.values()))),
            tuple(columns),
            "".join(column.dtype.char.replace("l", "q") for column in columns.values()),
            "".join(code for code, _, _ in packed),
            tuple(base for _, base, _ in packed),
            b"".join(data for _, _, data in packed),
        )

    def places(self) -> Iterator[tuple[str, tuple[str, float, int]]]:
        """Each column's name, and its code, base and first byte."""
        start = 0
        for name, code, base in zip(self.names, self.codes, self.bases, strict=True):
            yield name, (code, base, start)
            start += 0 if code == EQUAL else self.size * np.dtype(code).itemsize


def _packed(column: Column) -> tuple[str, float, bytes]:
    """(code, base, data) of a column."""
    if not len(column):
        return EQUAL, 0, b""
    return _packed_floats(column) if column.dtype.kind == "f" else _packed_integers(column.astype(np.int64))


def _packed_floats(column: NDArray[np.float64]) -> tuple[str, float, bytes]:
    bits = column.view(np.int64)
    if (bits == bits[0]).all():
        return EQUAL, float(column[0]), b""
    with np.errstate(over="ignore"):
        narrow = column.astype(np.float32)
    is_exact = np.array_equal(narrow.astype(np.float64).view(np.int64), bits)
    return ("f", 0, narrow.tobytes()) if is_exact else ("d", 0, column.tobytes())


def _packed_integers(column: NDArray[np.int64]) -> tuple[str, float, bytes]:
    least, most = int(column.min()), int(column.max())
    if least == most:
        return EQUAL, least, b""
    code = next((code for code in "BHI" if most - least <= np.iinfo(code).max), "q")
    base = 0 if code == "q" else least
    return code, base, (column - base).astype(code).tobytes()


class JoinedColumns:
    """The columns of several parts, one part after the other; each is made when it is asked for.

    Args:
        parts: packed columns; one that lacks a column has zeros there.
    """

    def __init__(self, parts: Sequence[PackedColumns]) -> None:
        self.parts = [part for part in parts if part.size]
        self.sizes = np.array([part.size for part in self.parts], np.int64)
        self.dtypes = {name: dtype for part in parts for name, dtype in zip(part.names, part.dtypes, strict=True)}
        self._places = [dict(part.places()) for part in self.parts]
        self._zeros = np.zeros(self.sizes.max(initial=0), np.uint8)

    def __getitem__(self, name: str) -> Column:
        """[n] the column of that name."""
        dtype = np.dtype(self.dtypes[name])
        found = [places.get(name, (EQUAL, 0, 0)) for places in self._places]
        pieces = [self._piece(part, code, start) for part, (code, _, start) in zip(self.parts, found, strict=True)]
        sent = np.concatenate([np.zeros(0, dtype), *pieces], dtype=dtype, casting="unsafe")
        bases = np.array([base for _, base, _ in found], dtype)
        if dtype.kind == "f":  # nothing is added to numbers that are sent: -0.0 would become 0.0
            is_equal = np.repeat([code == EQUAL for code, _, _ in found], self.sizes)
            return np.where(is_equal, np.repeat(bases, self.sizes), sent) if is_equal.any() else sent
        if bases.any():
            sent += np.repeat(bases, self.sizes)
        return sent

    def _piece(self, part: PackedColumns, code: str, start: int) -> Column:
        return self._zeros[: part.size] if code == EQUAL else np.frombuffer(part.data, code, part.size, start)
