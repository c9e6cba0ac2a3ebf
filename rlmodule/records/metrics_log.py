"""The metrics log: every logged number passes through it once, and callbacks subscribe to it.

Also the clock of the iteration in progress, and the one-line JSON form that ``metrics.jsonl`` is made of. Leaves out
which numbers there are (``experience/iteration_metrics.py``) and where they go (``callbacks/``, ``loggers/``).
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TextIO

KINDS = ("step", "iteration", "validation")

# JSON cannot write these numbers: the value is null, and the metric's name is listed under the number's own.
NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Record:
    """Metrics that were logged together.

    Args:
        kind: ``step`` (a mini-batch), ``iteration`` (rollouts and the training on them) or ``validation``.
        step: mini-batches seen when it was made; the x axis of every curve.
        iteration: iterations begun, so 1 in the first; 0 for a validation before any training.
        metrics: name as in TensorBoard -> value, which may be NaN or infinite.
    """

    kind: str
    step: int
    iteration: int
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"no record is called {self.kind}"


@dataclass
class Elapsed:
    """Wall and CPU seconds of this process."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


class PhaseClock:
    """Time spent in each phase; exactly one phase runs at any moment."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self._laps: dict[str, Elapsed] = {}
        self._mark = (perf_counter(), process_time())

    def switch(self, phase: str) -> None:
        """End the current phase and begin another."""
        now = (perf_counter(), process_time())
        spent = self._laps.setdefault(self.phase, Elapsed())
        spent.seconds += now[0] - self._mark[0]
        spent.cpu_seconds += now[1] - self._mark[1]
        self.phase, self._mark = phase, now

    def read(self) -> dict[str, Elapsed]:
        """Phase -> time so far, including the current phase."""
        self.switch(self.phase)
        return {phase: Elapsed(spent.seconds, spent.cpu_seconds) for phase, spent in self._laps.items()}


@dataclass
class MetricsLog:
    """The records of a run in this process and its current phase; subscribers are notified of both.

    Args:
        records: oldest first; on the first process they include those from before a resume.
        iteration: iterations begun.
        clock: time of the iteration in progress.
        counts: name -> number of rare events in this process, logged with every iteration once there is one.
    """

    records: list[Record] = field(default_factory=list)
    iteration: int = 0
    clock: PhaseClock = field(default_factory=lambda: PhaseClock("idle"))
    counts: dict[str, float] = field(default_factory=dict)
    _on_record: list[Callable[[Record], None]] = field(default_factory=list)
    _on_phase: list[Callable[[str], None]] = field(default_factory=list)
    _unwritten: set[str] = field(default_factory=set)

    def subscribe(
        self, on_record: Callable[[Record], None] | None = None, on_phase: Callable[[str], None] | None = None
    ) -> None:
        """Call ``on_record`` with every record to come, and ``on_phase`` with every phase that begins."""
        self._on_record += [on_record] if on_record else []
        self._on_phase += [on_phase] if on_phase else []

    def begin_iteration(self, number: int) -> None:
        """Iteration ``number`` (from 0) begins, with collecting responses; for ``RLDataModule(start=...)``."""
        self.iteration = number + 1
        self.clock = PhaseClock("collect")
        self._notify("collect")

    def enter(self, phase: str) -> None:
        """Begin a phase: ``collect``, ``update`` or ``validate``."""
        self.clock.switch(phase)
        self._notify(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[Elapsed]:
        """Context of a phase that interrupts another; what it yields holds the time it took, once it has ended."""
        before, start = self.clock.phase, self.clock.read().get(name, Elapsed())
        spent = Elapsed()
        self.enter(name)
        try:
            yield spent
        finally:
            end = self.clock.read()[name]
            spent.seconds, spent.cpu_seconds = end.seconds - start.seconds, end.cpu_seconds - start.cpu_seconds
            self.enter(before)

    def add(self, record: Record) -> None:
        """Keep a record and notify the subscribers."""
        self.records.append(record)
        for notify in self._on_record:
            notify(record)

    def count(self, name: str) -> None:
        """Count one event of that name."""
        self.counts[name] = self.counts.get(name, 0.0) + 1.0

    def value_at(self, step: int, metric: str) -> float | None:
        """The last finite value of a metric at ``step``; None if it was not logged there."""
        for record in reversed(self.records):
            if record.step < step:
                return None
            if record.step == step and math.isfinite(record.metrics.get(metric, math.nan)):
                return record.metrics[metric]
        return None

    @contextmanager
    def warn_on_write_error(self, what: str) -> Iterator[None]:
        """Context of a write that training does not depend on: a failure is warned of once, and training goes on."""
        try:
            yield
        except OSError as error:
            if what not in self._unwritten:
                self._unwritten.add(what)
                warnings.warn(
                    f"{what} cannot be written ({error.strerror or error}); training goes on without it, and this is "
                    "not said again. Free some space",
                    stacklevel=3,
                )

    def _notify(self, phase: str) -> None:
        for notify in self._on_phase:
            notify(phase)


def to_line(record: Record) -> str:
    """A record as one line of JSON, without the line break."""
    flat: dict[str, Any] = {"kind": record.kind, "step": record.step, "iteration": record.iteration}
    flat |= {name: value if math.isfinite(value) else None for name, value in record.metrics.items()}
    for number in NOT_FINITE:
        if names := [name for name, value in record.metrics.items() if str(float(value)) == number]:
            flat[number] = names
    return json.dumps(flat, allow_nan=False)


def from_line(line: str) -> Record:
    """Inverse of ``to_line``.

    Raises:
        ValueError, KeyError: the line is not a whole record.
    """
    flat = json.loads(line)
    kind, step, iteration = flat.pop("kind"), flat.pop("step"), flat.pop("iteration")
    for number in NOT_FINITE:
        flat |= dict.fromkeys(flat.pop(number, ()), float(number))
    return Record(kind, step, iteration, flat)


class RecordFile:
    """Appends to ``metrics.jsonl``; a line leaves the process as soon as it is complete.

    Args:
        path: the file; its present content is kept.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one line."""
        self._file.write(to_line(record) + "\n")

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()


def truncate_after(path: Path, step: int | None) -> list[Record]:
    """Remove the records after ``step`` from a file (None: all records), and return those that remain.

    A resumed run logs again what came after its checkpoint. A line that a dying process left half written goes too.
    """
    kept = [] if step is None else [r for r in read_records(path) if r.step <= step]
    with atomic_write(path) as aside:
        aside.write_text("".join(to_line(r) + "\n" for r in kept), encoding="utf-8")
    return kept


def read_records(path: Path) -> Sequence[Record]:
    """The complete records of a file in order; none if there is no file."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(from_line(line))
        except (ValueError, KeyError):
            continue
    return records


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which replaces ``path`` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.stem}.writing{path.suffix}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
