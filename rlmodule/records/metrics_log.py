"""What a run says of itself: every logged number passes through here once, and whoever keeps or shows it listens.

Also the clock of the iteration in progress, and the one-line JSON form that ``metrics.jsonl`` is made of. Leaves out
which numbers there are (``records/summary.py``) and where they go (``callbacks/``).
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

# JSON has no word for these numbers: the value is written as null and the metric is named under the number's own name.
NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Record:
    """Metrics of one moment.

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
    """Time by phase; exactly one phase runs at any moment."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self._laps: dict[str, Elapsed] = {}
        self._mark = (perf_counter(), process_time())

    def switch(self, phase: str) -> None:
        """End the phase that runs and begin another."""
        now = (perf_counter(), process_time())
        spent = self._laps.setdefault(self.phase, Elapsed())
        spent.seconds += now[0] - self._mark[0]
        spent.cpu_seconds += now[1] - self._mark[1]
        self.phase, self._mark = phase, now

    def read(self) -> dict[str, Elapsed]:
        """Phase -> time so far, the phase that runs included."""
        self.switch(self.phase)
        return {phase: Elapsed(spent.seconds, spent.cpu_seconds) for phase, spent in self._laps.items()}


@dataclass
class MetricsLog:
    """The records of a run in this process, the phase it is in, and the listeners told of both.

    Args:
        records: oldest first; on the first process they reach back before a resume.
        iteration: iterations begun.
        clock: time of the iteration in progress.
        counts: name -> rare events of this process so far, logged with every iteration from the first of them on.
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
        """Be told of every record to come, and of every phase that begins."""
        self._on_record += [on_record] if on_record else []
        self._on_phase += [on_phase] if on_phase else []

    def begin_iteration(self, number: int) -> None:
        """Responses of iteration ``number`` (from 0) are about to be collected; for ``RLDataModule(start=...)``."""
        self.iteration = number + 1
        self.clock = PhaseClock("collect")
        self._tell("collect")

    def enter(self, phase: str) -> None:
        """The iteration goes on with ``phase``: ``collect``, ``update`` or ``validate``."""
        self.clock.switch(phase)
        self._tell(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[Elapsed]:
        """Enclose a phase that interrupts another; the time it took is in the lap afterwards."""
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
        """Keep a record and tell the listeners."""
        self.records.append(record)
        for notify in self._on_record:
            notify(record)

    def count(self, name: str) -> None:
        """One more event of that name."""
        self.counts[name] = self.counts.get(name, 0.0) + 1.0

    def value_at(self, step: int, metric: str) -> float | None:
        """The finite value that a metric had when the run stood at ``step``; None where it was not taken there."""
        for record in reversed(self.records):
            if record.step < step:
                return None
            if record.step == step and math.isfinite(record.metrics.get(metric, math.nan)):
                return record.metrics[metric]
        return None

    @contextmanager
    def warn_on_write_error(self, what: str) -> Iterator[None]:
        """Around the write of a log: where it fails that is said once, and training goes on."""
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

    def _tell(self, phase: str) -> None:
        for notify in self._on_phase:
            notify(phase)


def to_line(record: Record) -> str:
    """A record as one line of JSON, without the line's end."""
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
    """``metrics.jsonl`` being written: a line leaves the process as soon as it is whole.

    Args:
        path: the file; what is in it already is kept.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one line."""
        self._file.write(to_line(record) + "\n")

    def close(self) -> None:
        """Give the file back; closing twice is harmless."""
        self._file.close()


def truncate_after(path: Path, step: int | None) -> list[Record]:
    """Cut a file of records back to those up to ``step`` (None: to nothing) and return them.

    What was logged after the checkpoint a run resumes from will be logged again, and so will a line that the end of the
    process left half written.
    """
    kept = [] if step is None else [r for r in read_records(path) if r.step <= step]
    with atomic_write(path) as aside:
        aside.write_text("".join(to_line(r) + "\n" for r in kept), encoding="utf-8")
    return kept


def read_records(path: Path) -> Sequence[Record]:
    """The whole records of a file in order; none where there is no file, and a torn line is left out."""
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
    """A place to write aside; it takes the place of ``path`` at the end, and nothing does when writing fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.stem}.writing{path.suffix}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
