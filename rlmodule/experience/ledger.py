"""What became of every sample of the stream of rows: trained, dropped, stale or failed, each counted once in a run.

Counts are checked against the rows that were taken, in every iteration and also after a resume. Leaves out who decides
that a sample is not learned from (``sample_info.py``, ``collect.py``, ``maker.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmodule.core.errors import TrainingError
from rlmodule.core.sample_metas import Bools
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.sample_table import SampleTable

TRAINED, DROPPED, STALE, FAILED = FATES = ("trained", "dropped", "stale", "failed")


@dataclass
class Ledger:
    """The samples of a run, over all ranks; saved with its checkpoints.

    Args:
        group_size: samples of each row; None where rows differ.
        rows: rows of the stream whose samples are counted: those before this place, and no other. None after a
            checkpoint without a ledger, whose counts begin with the first iteration after it.
        samples: all that these rows gave.
        counts: fate -> samples. ``trained`` were part of an optimizer step that was taken; ``failed`` have no reward;
            ``stale`` were drawn by too old a policy; ``dropped`` are the others: groups that were filtered, responses
            that were masked or rejected, samples without a gradient, steps that were skipped.
    """

    group_size: int | None = None
    rows: int | None = 0
    samples: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    _saved_size: int | None = field(default=None, init=False)  # group size of the run that saved it

    def check(self, iteration: Iteration, rows: int, *, is_resumed: bool = False) -> None:
        """Refuse an iteration that has not got every sample of its rows once.

        Args:
            iteration: that is to be trained on.
            rows: place in the stream after its rows.
            is_resumed: whether a checkpoint interrupted it; its samples are as many as that run drew.

        Raises:
            TrainingError: names the first rows and samples; the same on every rank.
        """
        new = new_samples(iteration).metas
        groups, sizes = np.unique(new.group_id, return_counts=True)
        if self.rows is None:
            self.rows = int(groups.min(initial=rows))
        due, is_due = np.arange(self.rows, rows), (groups >= self.rows) & (groups < rows)
        came = np.zeros(len(due), np.int64)
        came[groups[is_due] - self.rows] = sizes[is_due]
        size = self._saved_size if is_resumed else self.group_size
        least = size or 1
        ids, times = np.unique(new.sample_id, return_counts=True)
        lacking, others, twice = due[came < least], groups[~is_due], ids[times > 1]
        surplus = due[(came > least) & (size is not None)]
        wrong = (
            ("came without all their samples", "rows", lacking),
            ("came with more samples than they have", "rows", surplus),
            ("were not due", "rows", others),
            ("came twice", "samples", twice),
        )
        found = [f"{len(ids)} {kind} {words}, the first is number {ids[0]}" for words, kind, ids in wrong if len(ids)]
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
        numbers = np.concatenate(_fates(iteration, skipped))
        self.rows, self.samples = rows, self.samples + len(new_samples(iteration))
        for fate, count in zip(FATES, np.bincount(numbers, minlength=len(FATES)).tolist(), strict=True):
            self.counts[fate] += count
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
        counts = {"rows": self.rows, "samples": self.samples, "counts": dict(self.counts)}
        return {**counts, "group_size": self.group_size}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on where ``state`` was taken; None is of a checkpoint without a ledger."""
        self.rows = None if state is None else state["rows"]
        if state is not None:
            self.samples, self.counts = state["samples"], dict(state["counts"])
            self._saved_size = state["group_size"]


def new_samples(iteration: Iteration) -> SampleTable:
    """Every sample that was collected for an iteration, those that it left out too; none that is trained on again."""
    everyone = SampleTable.joined([iteration.sample_info, iteration.left_out])
    return everyone.where(~(everyone.is_replayed | everyone.metas.is_padding))


def fates_of(iteration: Iteration, skipped: Collection[int] = ()) -> list[str]:
    """The fate of each new sample of an iteration that was trained on; see ``Ledger``."""
    return [FATES[number] for number in np.concatenate(_fates(iteration, skipped)).tolist()]


def are_trained(iteration: Iteration, skipped: Collection[int]) -> Bools:
    """[n] whether a sample has a gradient in some mini-batch whose step was taken."""
    metas = iteration.sampler.metas
    trained = np.zeros(len(metas), bool)
    for number, plan in enumerate(iteration.sampler.plans):
        if plan.has_gradient and plan.totals.tokens and number not in skipped:
            trained[plan.samples[plan.samples < len(metas)]] = True  # from there on they are padding samples
    return np.logical_and(trained, metas.has_gradient)


def _fates(iteration: Iteration, skipped: Collection[int]) -> list[NDArray[np.uint8]]:
    """Numbers in ``FATES``: [n] of the new samples that are in the iteration, and of those that it left out."""
    found = []
    for table, trained in ((iteration.sample_info, are_trained(iteration, skipped)), (iteration.left_out, False)):
        fates = np.where(trained, np.uint8(FATES.index(TRAINED)), np.uint8(FATES.index(DROPPED)))
        fates = np.where(table.is_scored, fates, np.uint8(FATES.index(FAILED)))
        fates = np.where(table.is_stale, np.uint8(FATES.index(STALE)), fates)
        found.append(fates[~(table.is_replayed | table.metas.is_padding)])
    return found
