"""Which state of a run is the best one: its checkpoints beside the policy that it started from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlmodule.checkpoint.state import best_of, oldest_first, quality_of
from rlmodule.records.metrics_log import Record
from rlmodule.records.run_directory import RunDirectory
from rlmodule.records.summary import ACCURACY, held_out


def best_checkpoint(directory: RunDirectory, records: Sequence[Record]) -> Path | None:
    """The best checkpoint; None where none is as good as the policy that the run started from, or none is ranked."""
    best, result = best_of(oldest_first(directory.checkpoints)), held_out(records)
    quality = None if best is None else quality_of(best)
    if result is None or quality is None or quality.value is None or quality.metric not in (result.metric, ACCURACY):
        return best
    return best if result.is_as_good_as_start(quality.value) else None
