"""What every rank knows of every sample of an iteration, column by column: a million samples are some twenty arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import overload

import numpy as np
from numpy.typing import NDArray

from rlmodule.core.sample_metas import Bools, Ints, SampleMetas
from rlmodule.experience.sample_info import SampleInfo

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers of the samples that have them: ``values`` [n] float64, and ``present`` [n] bool, where they are."""

    values: Floats
    present: Bools

    def take(self, positions: Ints) -> Numbers:
        """Those of the samples at these positions."""
        return Numbers(self.values[positions], self.present[positions])

    @property
    def listed(self) -> list[float]:
        """The numbers there are."""
        listed: list[float] = self.values[self.present].tolist()
        return listed


@dataclass(frozen=True, eq=False)
class SampleTable(Sequence[SampleInfo]):
    """Reads as a sequence of SampleInfo; each is made when it is asked for.

    Args:
        metas: ids and lengths.
        reward, baseline: [n] float64, NaN where there is none.
        truncated: [n] bool.
        version: [n] int64.
        failed: [n] bool, whether the reward function failed.
        is_replayed, is_stale, is_mixed: [n] bool, as in SampleInfo.
        parts, diagnostics, counts: numbers by name.
        failures: sample id -> what went wrong, for a rank's first; not of samples that were left out since.
    """

    metas: SampleMetas
    reward: Floats
    baseline: Floats
    truncated: Bools
    version: Ints
    failed: Bools
    is_replayed: Bools
    is_stale: Bools
    is_mixed: Bools
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
            np.array([f.version for f in samples], np.int64),
            np.array([f.failure is not None for f in samples], bool),
            np.array([f.is_replayed for f in samples], bool),
            np.array([f.is_stale for f in samples], bool),
            np.array([f.is_mixed for f in samples], bool),
            _columns([f.parts for f in samples]),
            _columns([f.diagnostics for f in samples]),
            _columns([f.counts for f in samples]),
            {f.meta.sample_id: f.failure for f in samples if f.failure},
        )

    @classmethod
    def joined(cls, tables: Sequence[SampleTable]) -> SampleTable:
        """The samples of all tables, one after the other."""
        if len(tables) == 1:
            return tables[0]
        sizes = [len(table) for table in tables]
        return cls(
            SampleMetas(*(np.concatenate([getattr(t.metas, f.name) for t in tables]) for f in fields(SampleMetas))),
            np.concatenate([t.reward for t in tables]),
            np.concatenate([t.baseline for t in tables]),
            np.concatenate([t.truncated for t in tables]),
            np.concatenate([t.version for t in tables]),
            np.concatenate([t.failed for t in tables]),
            np.concatenate([t.is_replayed for t in tables]),
            np.concatenate([t.is_stale for t in tables]),
            np.concatenate([t.is_mixed for t in tables]),
            _joined([t.parts for t in tables], sizes),
            _joined([t.diagnostics for t in tables], sizes),
            _joined([t.counts for t in tables], sizes),
            {key: text for t in tables for key, text in t.failures.items()},
        )

    @property
    def is_scored(self) -> Bools:
        """[n] whether the reward says anything about the response."""
        is_scored: Bools = np.isfinite(self.reward)
        return is_scored

    def take(self, positions: Ints) -> SampleTable:
        """The samples at these positions, in this order."""

        def taken(columns: Mapping[str, Numbers]) -> dict[str, Numbers]:
            return {name: column.take(positions) for name, column in columns.items()}

        return SampleTable(
            self.metas.take(positions),
            self.reward[positions],
            self.baseline[positions],
            self.truncated[positions],
            self.version[positions],
            self.failed[positions],
            self.is_replayed[positions],
            self.is_stale[positions],
            self.is_mixed[positions],
            taken(self.parts),
            taken(self.diagnostics),
            taken(self.counts),
            self.failures,
        )

    def by_sample_id(self) -> SampleTable:
        """The samples in the order of their ids; itself where they stand in it."""
        ids = self.metas.sample_id
        return self if (ids[1:] >= ids[:-1]).all() else self.take(np.argsort(ids, kind="stable"))

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
        )


def _floats(values: Iterable[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Numbers]:
    """[n] numbers by name of each sample -> [n] numbers of each name."""
    found: dict[str, Numbers] = {}
    for place, row in enumerate(rows):
        for name, value in row.items():
            if name not in found:
                found[name] = Numbers(np.zeros(len(rows)), np.zeros(len(rows), bool))
            found[name].values[place], found[name].present[place] = value, True
    return found


def _joined(parts: Sequence[Mapping[str, Numbers]], sizes: Sequence[int]) -> dict[str, Numbers]:
    """The numbers of each name one after the other; of a part that lacks a name there are none."""
    names = dict.fromkeys(name for part in parts for name in part)
    lacking = {size: Numbers(np.zeros(size), np.zeros(size, bool)) for size in set(sizes)}
    found = {}
    for name in names:
        columns = [part.get(name, lacking[size]) for part, size in zip(parts, sizes, strict=True)]
        values, present = ([getattr(c, key) for c in columns] for key in ("values", "present"))
        found[name] = Numbers(np.concatenate(values), np.concatenate(present))
    return found
