"""What became of every sample of the stream of rows: trained, dropped, stale or failed, each counted once in a run.

Counts are checked against the rows that were taken, in every iteration and also after a resume. Leaves out who decides
that a sample is not learned from (``sample_info.py``, ``collect.py``, ``maker.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmodule.core.errors import TrainingError
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.sample_info import SampleInfo

TRAINED, DROPPED, STALE, FAILED = FATES = ("trained", "dropped", "stale", "failed")


@dataclass
class Ledger:
    """The samples of a run, over all ranks; saved with its checkpoints.

    Args:
        group_size: samples of each row; None where rows differ.
        rows: rows of the stream whose samples are counted: those before this place, and no other. None after a
            checkpoint without a ledger, whose counts begin with the next iteration.
        samples: all that these rows gave.
        counts: fate -> samples. ``trained`` were part of an optimizer step that was taken; ``failed`` have no reward;
            ``stale`` were drawn by too old a policy; ``dropped`` are the others: groups that were filtered, responses
            that were masked or rejected, samples without a gradient, steps that were skipped.
    """

    group_size: int | None = None
    rows: int | None = 0
    samples: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))

    def check(self, iteration: Iteration, rows: int) -> None:
        """Refuse an iteration that has not got every sample of its rows once.

        Args:
            iteration: that is to be trained on.
            rows: place in the stream after its rows.

        Raises:
            TrainingError: names the first rows and samples; the same on every rank.
        """
        new = new_samples(iteration)
        groups = Counter(info.meta.group_id for info in new)
        if self.rows is None:
            self.rows = min(groups, default=rows)
        due = range(self.rows, rows)
        least = self.group_size or 1
        lacking = [row for row in due if groups[row] < least]
        others = sorted(groups.keys() - set(due))
        twice = sorted(name for name, times in Counter(info.meta.sample_id for info in new).items() if times > 1)
        surplus = [row for row in due if self.group_size is not None and groups[row] > least]
        wrong = (
            ("came without all their samples", "rows", lacking),
            ("came with more samples than they have", "rows", surplus),
            ("were not due", "rows", others),
            ("came twice", "samples", twice),
        )
        found = [f"{len(ids)} {kind} {words}, the first is number {ids[0]}" for words, kind, ids in wrong if ids]
        if found:
            raise TrainingError(
                f"the ledger of samples disagrees: rows {self.rows} to {rows - 1} of the stream were due, and "
                f"{'; '.join(found)}. None of it was trained on. Go on from the last checkpoint with resume=auto, and "
                "report it if it happens again"
            )

    def settle(self, iteration: Iteration, rows: int, skipped: Collection[int]) -> None:
        """Count the samples of an iteration that was trained on.

        Args:
            iteration, rows: as checked.
            skipped: numbers of the mini-batches whose optimizer step was not taken.

        Raises:
            TrainingError: the sums are not those of the samples that came; the same on every rank.
        """
        fates = Counter(fates_of(iteration, skipped))
        self.rows, self.samples = rows, self.samples + len(new_samples(iteration))
        for fate in FATES:
            self.counts[fate] += fates[fate]
        if sum(self.counts.values()) != self.samples:
            counted = ", ".join(f"{count} {fate}" for fate, count in self.counts.items())
            raise TrainingError(
                f"the ledger of samples disagrees: the first {rows} rows of the stream gave {self.samples} samples, "
                f"counted are {counted}. Go on from the last checkpoint with resume=auto, and report it if it happens "
                "again"
            )

    def metrics(self, rows_taken: int) -> dict[str, float]:
        """``samples/FATE`` so far, and where rows give equally many samples those that are still under way."""
        found = {f"samples/{fate}": float(count) for fate, count in self.counts.items()}
        if self.group_size is not None and self.rows is not None:
            found["samples/in_flight"] = float((rows_taken - self.rows) * self.group_size)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; the same on every rank."""
        return {"rows": self.rows, "samples": self.samples, "counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on where ``state`` was taken; None is of a checkpoint without a ledger."""
        self.rows = None if state is None else state["rows"]
        if state is not None:
            self.samples, self.counts = state["samples"], dict(state["counts"])


def new_samples(iteration: Iteration) -> list[SampleInfo]:
    """Every sample that was collected for an iteration, those that it left out too; none that is trained on again."""
    everyone = (*iteration.sample_info, *iteration.left_out)
    return [info for info in everyone if not (info.is_replayed or info.meta.is_padding)]


def fates_of(iteration: Iteration, skipped: Collection[int] = ()) -> list[str]:
    """The fate of each new sample of an iteration that was trained on; see ``Ledger``."""
    trained = positions_trained(iteration, skipped)
    inside = [_fate(info, p in trained) for p, info in enumerate(iteration.sample_info) if not info.is_replayed]
    return inside + [_fate(info, False) for info in iteration.left_out]


def positions_trained(iteration: Iteration, skipped: Collection[int]) -> set[int]:
    """Positions of samples with a gradient in some mini-batch whose step was taken."""
    sampler = iteration.sampler
    plans: Sequence[Sequence[int]] = [
        plan.positions if plan.has_gradient and plan.totals.tokens and number not in skipped else ()
        for number, plan in enumerate(sampler.plans)
    ]
    count = len(sampler.metas)  # from there on positions are padding samples
    return {p for plan in plans for p in plan if p < count and sampler.metas[p].has_gradient}


def _fate(info: SampleInfo, is_trained: bool) -> str:
    if info.is_stale:
        return STALE
    if not info.is_scored:
        return FAILED
    return TRAINED if is_trained else DROPPED
