"""What every rank knows of every sample of an iteration, column by column: a million samples are some twenty arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rlmodule.core.sample_metas import Bools, Counts, Ints, SampleMetas
from rlmodule.experience.packed_columns import Column, JoinedColumns, PackedColumns
from rlmodule.experience.sample_info import SampleInfo

Floats = NDArray[np.float64]

# Fields of a SampleTable with a number, and with numbers by name, of each sample.
COLUMNS = ("reward", "baseline", "truncated", "version", "failed", "is_replayed", "is_stale", "is_mixed", "num_shown")
NUMBERS = ("parts", "diagnostics", "counts")


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers of the samples that have them: ``values`` [n] float64, and ``present`` [n] bool, where they are."""

    values: Floats
    present: Bools

    @property
    def there(self) -> Floats:
        """The numbers there are."""
        return self.values[self.present]


@dataclass(frozen=True, eq=False)
class SampleTable(Sequence[SampleInfo]):
    """Reads as a sequence of SampleInfo; each is made when it is asked for.

    Args:
        metas: ids and lengths.
        reward, baseline: [n] float64, NaN where there is none.
        truncated: [n] bool.
        version: [n] int32.
        failed: [n] bool, whether the reward function failed.
        is_replayed, is_stale, is_mixed: [n] bool, as in SampleInfo.
        num_shown: [n] int32, likewise.
        parts, diagnostics, counts: numbers by name.
        failures: sample id -> what went wrong, for a rank's first; not of samples that were left out since.
    """

    metas: SampleMetas
    reward: Floats
    baseline: Floats
    truncated: Bools
    version: Counts
    failed: Bools
    is_replayed: Bools
    is_stale: Bools
    is_mixed: Bools
    num_shown: Counts
    parts: Mapping[str, Numbers]
    diagnostics: Mapping[str, Numbers]
    counts: Mapping[str, Numbers]
    failures: Mapping[int, str]

    @classmethod
    def of(cls, samples: Sequence[SampleInfo]) -> SampleTable:
        """The columns of a sequence; itself where it has columns already."""
        if isinstance(samples, SampleTable):
            return samples
        return cls(
            SampleMetas.of([f.meta for f in samples]),
            _floats(f.reward for f in samples),
            _floats(f.baseline for f in samples),
            np.array([f.truncated for f in samples], bool),
            np.array([f.version for f in samples], np.int32),
            np.array([f.failure is not None for f in samples], bool),
            np.array([f.is_replayed for f in samples], bool),
            np.array([f.is_stale for f in samples], bool),
            np.array([f.is_mixed for f in samples], bool),
            np.array([f.num_shown for f in samples], np.int32),
            _numbers([f.parts for f in samples]),
            _numbers([f.diagnostics for f in samples]),
            _numbers([f.counts for f in samples]),
            {f.meta.sample_id: f.failure for f in samples if f.failure},
        )

    @classmethod
    def joined(cls, tables: Sequence[SampleTable]) -> SampleTable:
        """The samples of all tables, one after the other; a table itself where the others are empty."""
        filled = [table for table in tables if len(table)]
        if len(filled) < 2:
            return next(iter(filled or tables))
        everyone = [table._columns() for table in filled]
        names = dict.fromkeys(name for columns in everyone for name in columns)
        lacking = {size: np.zeros(size) for size in {len(table) for table in filled}}

        def column(name: str) -> Column:
            found = [c.get(name, lacking[len(t)]) for c, t in zip(everyone, filled, strict=True)]
            return np.concatenate(found, dtype=next(c[name].dtype for c in everyone if name in c), casting="unsafe")

        failures = {key: text for table in filled for key, text in table.failures.items()}
        return cls._from_columns({name: column(name) for name in names}, failures)

    def packed(self) -> PackedSamples:
        """The table as it is sent to other ranks."""
        return PackedSamples(PackedColumns.of(self._columns()), self.failures)

    @classmethod
    def gathered(cls, parts: Sequence[PackedSamples]) -> SampleTable:
        """The samples of all ranks in the order of their ids."""
        columns = JoinedColumns([part.columns for part in parts])
        ids = columns["sample_id"]
        order = None if (ids[1:] >= ids[:-1]).all() else np.argsort(ids, kind="stable")
        # One column after the other, so that no two tables are held at once.
        found = {name: columns[name] if order is None else columns[name].take(order) for name in columns.dtypes}
        return cls._from_columns(found, {key: text for part in parts for key, text in part.failures.items()})

    def _columns(self) -> dict[str, Column]:
        """Every column by a name of its own; of numbers two."""
        columns = {f.name: getattr(self.metas, f.name) for f in fields(SampleMetas)}
        columns |= {name: getattr(self, name) for name in COLUMNS}
        for kind in NUMBERS:
            for name, numbers in getattr(self, kind).items():
                columns[f"{kind} {name}"], columns[f"has {kind} {name}"] = numbers.values, numbers.present
        return columns

    @classmethod
    def _from_columns(cls, columns: Mapping[str, Column], failures: Mapping[int, str]) -> SampleTable:
        """Inverse of ``_columns``."""
        metas = SampleMetas(*(columns[f.name] for f in fields(SampleMetas)))
        by_kind: dict[str, dict[str, Numbers]] = {kind: {} for kind in NUMBERS}
        for key in columns:
            kind, _, name = key.partition(" ")
            if kind in by_kind:
                by_kind[kind][name] = Numbers(columns[key], columns[f"has {key}"])
        others: dict[str, Any] = {name: columns[name] for name in COLUMNS} | by_kind
        return cls(metas=metas, failures=failures, **others)

    @property
    def is_scored(self) -> Bools:
        """[n] whether the reward says anything about the response."""
        is_scored: Bools = np.isfinite(self.reward)
        return is_scored

    def take(self, positions: Ints) -> SampleTable:
        """The samples at these positions, in this order."""
        columns = {name: column[positions] for name, column in self._columns().items()}
        return SampleTable._from_columns(columns, self.failures)

    def where(self, chosen: Bools) -> SampleTable:
        """The samples that are chosen, [n] bool; itself where all are."""
        return self if chosen.all() else self.take(np.flatnonzero(chosen))

    def positions_of(self, sample_ids: Iterable[int]) -> list[int]:
        """Where the samples with these ids stand."""
        ids, wanted = self.metas.sample_id, np.array(list(sample_ids), np.int64)
        by_id = np.argsort(ids, kind="stable")
        positions: list[int] = by_id[np.searchsorted(ids, wanted, sorter=by_id)].tolist()
        return positions

    def __len__(self) -> int:
        return len(self.metas)

    @overload
    def __getitem__(self, index: int) -> SampleInfo: ...

    @overload
    def __getitem__(self, index: slice) -> SampleTable: ...

    def __getitem__(self, index: int | slice) -> SampleInfo | SampleTable:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        meta = self.metas[index]
        parts, diagnostics, counts = (
            {name: float(column.values[index]) for name, column in columns.items() if column.present[index]}
            for columns in (self.parts, self.diagnostics, self.counts)
        )
        return SampleInfo(
            meta,
            _number(self.reward[index]),
            parts,
            bool(self.truncated[index]),
            _number(self.baseline[index]),
            int(self.version[index]),
            diagnostics,
            counts,
            self.failures.get(meta.sample_id, "") if self.failed[index] else None,
            bool(self.is_replayed[index]),
            bool(self.is_stale[index]),
            bool(self.is_mixed[index]),
            int(self.num_shown[index]),
        )


def _floats(values: Iterable[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _numbers(rows: Sequence[Mapping[str, float]]) -> dict[str, Numbers]:
    """[n] numbers by name of each sample -> [n] numbers of each name."""
    found: dict[str, Numbers] = {}
    for place, row in enumerate(rows):
        for name, value in row.items():
            if name not in found:
                found[name] = Numbers(np.zeros(len(rows)), np.zeros(len(rows), bool))
            found[name].values[place], found[name].present[place] = value, True
    return found


@dataclass(frozen=True)
class PackedSamples:
    """A SampleTable on its way to other ranks: its columns, and its failures."""

    columns: PackedColumns
    failures: Mapping[int, str]
