"""Cutting a packed row into shorter rows by samples, for a row that does not fit in memory.

A loss divides by the totals of the mini-batch, so the rows together have the loss, the gradient and the metrics of the
one they were cut from. Leaves out rows that are sharded over sequence ranks, and who decides to cut
(``row_limit.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlmodule.batching.collate import LOSS_TOKEN_FIELDS, TOP_TOKEN_FIELDS
from rlmodule.batching.membership import numbered_by_appearance
from rlmodule.core.types import MicroBatch

_PER_LOSS_TOKEN = (*LOSS_TOKEN_FIELDS, *TOP_TOKEN_FIELDS, "labels", "sequence", "loss_positions", "selected")
_PER_SAMPLE = ("loss_tokens", "group_tokens", "sample_id")


def cut(batch: MicroBatch, max_tokens: int, *, keep_groups: bool = False) -> list[MicroBatch]:
    """Rows of at most ``max_tokens`` tokens, or of a single unit that has more.

    Args:
        batch: a whole row.
        max_tokens: of a row.
        keep_groups: a unit is a group, which stays in one row; else it is a sample, and the rows have the samples and
            their loss tokens in the order of ``batch``.
    """
    own, prefix = _segments_of_samples(batch)
    length = np.diff(batch.cu_seqlens.numpy())  # [S]
    rows: list[list[int]] = []
    segments: set[int] = set()
    for unit in _units(batch, keep_groups):
        wanted = {segment for b in unit for segment in (own[b], prefix[b]) if segment >= 0}
        if rows and int(length[list(segments | wanted)].sum()) <= max_tokens:
            rows[-1] += unit
            segments |= wanted
        else:
            rows.append(list(unit))
            segments = wanted
    return [batch] if len(rows) == 1 else [_part(batch, sorted(row), own, prefix) for row in rows]


def is_one_unit(batch: MicroBatch, *, keep_groups: bool = False) -> bool:
    """Whether the row cannot be cut."""
    return len(_units(batch, keep_groups)) == 1


def without_samples(batch: MicroBatch) -> MicroBatch:
    """A row of the first token of ``batch`` and no loss, for a process that has no more rows while others do."""
    fields = {n: None if v is None else v[:0] for n in _PER_LOSS_TOKEN for v in [getattr(batch, n)]}
    none = torch.zeros(1, dtype=torch.int64, device=batch.input_ids.device)
    return replace(
        batch,
        input_ids=batch.input_ids[:1],
        position_ids=batch.position_ids[:1],
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_length=1,
        prefix=None,
        loss_tokens=none,
        group_tokens=none,
        sample_id=none - 1,
        group=none,
        positions=(),
        **fields,  # type: ignore[arg-type]
    )


def _units(batch: MicroBatch, keep_groups: bool) -> list[list[int]]:
    """The samples of each unit."""
    if not keep_groups or batch.group is None:
        return [[b] for b in range(len(batch.loss_tokens))]
    units: dict[int, list[int]] = {}
    for b, group in enumerate(batch.group.tolist()):
        units.setdefault(group, []).append(b)
    return list(units.values())


def _segments_of_samples(batch: MicroBatch) -> tuple[list[int], list[int]]:
    """For each sample its own segment, and the one of its shared prompt (-1 where it has its prompt to itself)."""
    count = len(batch.cu_seqlens) - 1
    continues = [-1] * count if batch.prefix is None else batch.prefix.tolist()
    shared = set(continues)
    own = [segment for segment in range(count) if segment not in shared]
    assert len(own) == len(batch.loss_tokens), f"{len(own)} segments for {len(batch.loss_tokens)} samples"
    return own, [continues[segment] for segment in own]


def _part(batch: MicroBatch, members: Sequence[int], own: Sequence[int], prefix: Sequence[int]) -> MicroBatch:
    """The row of the samples ``members`` alone, which are in ascending order."""
    borders = batch.cu_seqlens.tolist()
    kept = sorted({segment for b in members for segment in (own[b], prefix[b]) if segment >= 0})
    lengths = np.array([borders[s + 1] - borders[s] for s in kept])
    starts = np.concatenate([[0], lengths.cumsum()])
    place = {segment: index for index, segment in enumerate(kept)} | {-1: -1}
    continues = None if batch.prefix is None else [place[s] for s in batch.prefix[kept].tolist()]
    device = batch.input_ids.device

    def on_device(values: object) -> Tensor:
        return torch.as_tensor(values, device=device)

    tokens = torch.cat([torch.arange(borders[s], borders[s + 1], device=device) for s in kept])
    new_number = on_device(_inverse(members, len(own)))  # [B], -1 for samples that are not here
    mine = new_number[batch.sequence] >= 0
    shift = on_device([int(starts[place[own[b]]]) - borders[own[b]] for b in members])
    per_token = {name: getattr(batch, name) for name in _PER_LOSS_TOKEN}
    fields: dict[str, Tensor | None] = {n: None if v is None else v[mine] for n, v in per_token.items()}
    sequence = new_number[batch.sequence[mine]]
    per_sample = {name: getattr(batch, name) for name in _PER_SAMPLE}
    fields |= {n: None if v is None else v[on_device(list(members))] for n, v in per_sample.items()}
    fields |= {"sequence": sequence, "loss_positions": batch.loss_positions[mine] + shift[sequence]}
    return replace(
        batch,
        input_ids=batch.input_ids[tokens],
        position_ids=batch.position_ids[tokens],
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_length=int(lengths.max()),
        prefix=None if continues is None else torch.tensor(continues),
        group=None if batch.group is None else on_device(_groups(batch.group, members)),
        positions=tuple(batch.positions[b] for b in members if b < len(batch.positions)),
        **fields,  # type: ignore[arg-type]
    )


def _inverse(members: Sequence[int], count: int) -> list[int]:
    """[B] place of each sample among ``members``, -1 where it is not one of them."""
    places = [-1] * count
    for place, b in enumerate(members):
        places[b] = place
    return places


def _groups(group: Tensor, members: Sequence[int]) -> np.ndarray:
    """[members] group numbers from 0."""
    return numbered_by_appearance(group.cpu().numpy()[list(members)])
