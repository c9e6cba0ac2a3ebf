"""What a checkpoint keeps of an iteration that is being trained on: what all ranks know, and what this rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from rlmodule.checkpoint.samples import PlainState, fields_of, training_samples_from, training_samples_state
from rlmodule.core.types import SampleMeta, TrainingSample
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.sample_info import SampleInfo
from rlmodule.experience.sample_table import SampleTable


@dataclass(frozen=True)
class SavedIteration:
    """An iteration as a checkpoint holds it, from any number of ranks.

    Args:
        sample_info: every sample of the iteration over all ranks, by sample id.
        rows: position -> row, of all ranks together.
        advantages: [B] float64 over ``sample_info``, or None.
        metrics: of the iteration.
        sampler: state of the sampler: the mini-batches that were trained on.
        left_out: as in Iteration.
        skipped: numbers of the mini-batches among those whose optimizer step was not taken.
    """

    sample_info: SampleTable
    rows: Mapping[int, TrainingSample]
    advantages: Tensor | None
    metrics: Mapping[str, float]
    sampler: Mapping[str, int]
    left_out: SampleTable = field(default_factory=partial(SampleTable.of, ()))
    skipped: Sequence[int] = ()

    @classmethod
    def from_state(cls, shared: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> SavedIteration:
        """Inverse of ``iteration_state``, given the parts of all ranks that saved it."""
        rows = {position: row for rank in ranks for position, row in training_samples_from(rank).items()}
        info, left_out = (_infos_from(shared.get(name, ())) for name in ("sample_info", "left_out"))
        skipped = shared.get("skipped", ())
        return cls(info, rows, shared["advantages"], shared["metrics"], shared["sampler"], left_out, skipped)


def iteration_state(iteration: Iteration, skipped: Iterable[int] = ()) -> tuple[PlainState, PlainState]:
    """(what is the same on every rank, what this rank holds), of plain values and tensors."""
    shared = {
        "sample_info": _infos_state(iteration.sample_info),
        "left_out": _infos_state(iteration.left_out),
        "skipped": sorted(skipped),
        "advantages": iteration.advantages,
        "metrics": dict(iteration.metrics),
        "sampler": iteration.sampler.state_dict(),
    }
    return shared, training_samples_state(iteration.experience.rows)


def _infos_state(infos: Iterable[SampleInfo]) -> list[PlainState]:
    return [{**fields_of(info), "meta": fields_of(info.meta)} for info in infos]


def _infos_from(states: Iterable[Mapping[str, Any]]) -> SampleTable:
    return SampleTable.of([SampleInfo(**{**one, "meta": SampleMeta(**one["meta"])}) for one in states])
