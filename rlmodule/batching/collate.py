"""Collation: samples -> packed micro-batches, laid end to end without padding.

Labels are shifted before a row is sharded over sequence ranks, so no label is lost at a shard's border.

Samples of a group that have the same prompt may share it. The row then holds the prompt once, followed by one segment
per sample. Of a prompt only the last token predicts a response token, and the last response token predicts nothing. So
the shared segment is the prompt without its last token, and the segment of a sample is the last prompt token followed
by the response without its last token: as many tokens as the response has. Position ids, and therefore
log-probabilities, are those of the sample packed without sharing.

Which samples form a micro-batch is decided in ``sampler.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlmodule.batching.membership import numbered_by_appearance
from rlmodule.batching.sampler import RankShare
from rlmodule.core.slices import SlicePlace, slice_positions
from rlmodule.core.types import MicroBatch, MiniBatch, Prompt, Sample, StepTotals, TrainingSample

IGNORED_LABEL = -100  # what torch's cross entropy ignores by default

# Fields that are [R] in a TrainingSample and [N] (loss tokens only) in a MicroBatch.
LOSS_TOKEN_FIELDS = (
    "old_logprob",
    "ref_logprob",
    "teacher_logprob",
    "advantage",
    "rollout_weight",
    "old_value",
    "returns",
)
# The same of several tokens at each position: [R, K] and [N, K]. None where no row has them.
TOP_TOKEN_FIELDS = ("teacher_top_ids", "teacher_top_logprob")


@dataclass(frozen=True)
class DynamicCollator:
    """Builds this rank's MiniBatch from the samples its plan names.

    Args:
        pad_token_id: token id of padding samples, dummy micro-batches and the padding segment.
        sp_size: sequence-parallel ranks; the packed row is padded to a multiple of it by an extra segment.
        sp_rank: which slice of the row this process keeps.
        cp_size: parts of the row whose tokens attend on different ranks.
        share_prompts: compute a prompt once for all samples of its group that are in the same micro-batch.
        num_top_tokens: likeliest tokens of a teacher at each position; 0 without.
    """

    pad_token_id: int = 0
    sp_size: int = 1
    sp_rank: int = 0
    share_prompts: bool = False
    num_top_tokens: int = 0
    cp_size: int = 1

    def __call__(self, fetched: tuple[RankShare, Sequence[Sequence[TrainingSample]]]) -> MiniBatch:
        """(share of this rank, its samples by micro-batch) -> MiniBatch."""
        share, rows = fetched
        slices = share.slices or [None] * len(rows)
        micro_batches = [
            self.pack(part, share.totals, positions, shared)
            for part, positions, shared in zip(rows, share.micro_batches, slices, strict=True)
        ]
        return MiniBatch(
            tuple(micro_batches),
            share.totals,
            share.metrics,
            share.trained_models,
            share.has_gradient,
            share.longest_row,
        )

    def pack(
        self,
        rows: Sequence[TrainingSample],
        totals: StepTotals,
        positions: tuple[int, ...] = (),
        shared: SlicePlace | None = None,
    ) -> MicroBatch:
        """Pack ``rows`` into one micro-batch; no rows give a dummy micro-batch of two tokens without loss.

        ``shared`` is the slice to keep; None for that of the collator.
        """
        kept = shared or SlicePlace(self.sp_size, self.sp_rank, self.cp_size)
        rows = rows or [padding_sample(self.pad_token_id)]
        packed = pack_rows(rows, totals, positions, share_prompts=self.share_prompts)
        if self.num_top_tokens and not len(packed.labels):
            none = torch.zeros(0, self.num_top_tokens)
            packed = replace(packed, teacher_top_ids=none.long(), teacher_top_logprob=none)
        packed = pad_to_multiple(packed, kept.size, self.pad_token_id)
        return shard_for_rank(packed, kept.rank, kept.size, kept.num_parts)


def pack_rows(
    rows: Sequence[TrainingSample],
    totals: StepTotals,
    positions: tuple[int, ...] = (),
    *,
    share_prompts: bool = False,
) -> MicroBatch:
    """Lay samples end to end in one row.

    Args:
        rows: samples of the micro-batch, B; none of their prompts is empty.
        totals: counts of the whole mini-batch.
        positions: index of each sample among those of the iteration.
        share_prompts: see ``DynamicCollator``.

    Returns:
        The micro-batch; loss tokens are in the order of the samples, each at the position that predicts it.
    """
    samples = [row.sample for row in rows]
    assert all(s.prompt.ids for s in samples), (
        "a response token is predicted by one before it: prompts must not be empty"
    )
    segments, first_loss_position = _segments(samples, share_prompts)
    lengths = np.array([len(s.ids) for s in segments])
    masks = [s.loss_mask for s in samples]
    loss_tokens = torch.tensor([int(mask.sum()) for mask in masks])
    has_top = any(row.teacher_top_ids is not None for row in rows)
    fields = LOSS_TOKEN_FIELDS + (TOP_TOKEN_FIELDS if has_top else ())
    return MicroBatch(
        input_ids=torch.cat([s.ids for s in segments]),
        position_ids=torch.from_numpy(
            np.concatenate([np.arange(s.position, s.position + n) for s, n in zip(segments, lengths, strict=True)])
        ),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)),
        loss_positions=torch.cat(
            [mask.nonzero().squeeze(-1) + first for mask, first in zip(masks, first_loss_position, strict=True)]
        ),
        labels=torch.cat([s.response_ids[s.loss_mask] for s in samples]),
        sequence=torch.arange(len(rows)).repeat_interleave(loss_tokens),
        loss_tokens=loss_tokens,
        group_tokens=torch.tensor([totals.group_tokens.get(s.group_id, 0) for s in samples]),
        max_length=int(lengths.max()),
        prefix=torch.tensor([s.prefix for s in segments]) if len(segments) > len(samples) else None,
        sample_id=torch.tensor([s.sample_id for s in samples]),
        group=torch.from_numpy(numbered_by_appearance(np.array([s.group_id for s in samples]))),
        positions=positions,
        **{name: _loss_tokens_of([getattr(row, name) for row in rows], masks) for name in fields},  # type: ignore[arg-type]
    )


@dataclass(frozen=True, eq=False)
class _Segment:
    """Consecutive tokens of a packed row.

    Args:
        ids: [length] int64 token ids.
        position: position id of the first one.
        prefix: index of the segment these tokens continue (a shared prompt), -1 for none.
    """

    ids: Tensor
    position: int = 0
    prefix: int = -1


def _segments(samples: Sequence[Sample], share_prompts: bool) -> tuple[list[_Segment], list[int]]:
    """Segments in packed order, and for each sample the position that predicts its first response token.

    A prompt of one token is never shared: its last token belongs to each sample's own segment.
    """
    num_sharing = Counter(_prompt_of(s) for s in samples if share_prompts and len(s.prompt.ids) > 1)
    segments: list[_Segment] = []
    first_loss_position: list[int] = []
    segment_of: dict[tuple[int, tuple[int, ...]], int] = {}
    end = 0  # tokens packed so far
    for sample in samples:
        prompt, before = torch.tensor(sample.prompt.ids), len(sample.prompt.ids) - 1
        key = _prompt_of(sample)
        if num_sharing[key] < 2:
            first_loss_position.append(end + before)
            segments.append(_Segment(torch.cat([prompt, sample.response_ids])))
        else:
            if key not in segment_of:
                segment_of[key] = len(segments)
                segments.append(_Segment(prompt[:-1]))
                end += before
            first_loss_position.append(end)
            own = torch.cat([prompt[-1:], sample.response_ids[:-1]])
            segments.append(_Segment(own, before, segment_of[key]))
        end += len(segments[-1].ids)
    return segments, first_loss_position


def _prompt_of(sample: Sample) -> tuple[int, tuple[int, ...]]:
    return sample.group_id, sample.prompt.ids


def _loss_tokens_of(values: Sequence[Tensor | None], masks: Sequence[Tensor]) -> Tensor | None:
    """Concatenate the loss tokens of a per-token value.

    Args:
        values: [R] or [R, K] of each sample, or None for one without it (a padding sample, which has no loss tokens).
        masks: [R] bool of each sample.

    Returns:
        [N] or [N, K] float32 (int64 for ids), or None when no sample has the value.
    """
    if all(value is None for value in values) and any(bool(mask.any()) for mask in masks):
        return None
    like = next((v[:0] for v in values if v is not None), torch.zeros(0))
    parts = [like if v is None else v[m] for v, m in zip(values, masks, strict=True)]
    assert all(len(p) == int(m.sum()) for p, m in zip(parts, masks, strict=True)), (
        "a row with loss tokens lacks a value"
    )
    joined = torch.cat(parts)
    return joined.float() if joined.is_floating_point() else joined


def pad_to_multiple(batch: MicroBatch, multiple: int, pad_token_id: int) -> MicroBatch:
    """Pad T to a multiple by one more segment without loss tokens; samples do not attend to it."""
    missing = -len(batch.input_ids) % multiple
    if missing == 0:
        return batch
    end = int(batch.cu_seqlens[-1]) + missing
    zero = torch.zeros(1, dtype=torch.int64)
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, torch.full((missing,), pad_token_id)]),
        position_ids=torch.cat([batch.position_ids, torch.arange(missing)]),
        cu_seqlens=torch.cat([batch.cu_seqlens, torch.tensor([end], dtype=torch.int32)]),
        loss_tokens=torch.cat([batch.loss_tokens, zero]),
        group_tokens=torch.cat([batch.group_tokens, zero]),
        sample_id=None if batch.sample_id is None else torch.cat([batch.sample_id, zero - 1]),
        prefix=None if batch.prefix is None else torch.cat([batch.prefix, zero - 1]),
        group=None if batch.group is None else torch.cat([batch.group, batch.group.max()[None] + 1]),
        max_length=max(batch.max_length, missing),
    )


def shifted_labels(batch: MicroBatch) -> Tensor:
    """[T] int64 label of each position, ``IGNORED_LABEL`` at positions without loss."""
    labels = torch.full_like(batch.input_ids, IGNORED_LABEL)
    labels[batch.loss_positions] = batch.labels
    return labels


def shard_for_rank(batch: MicroBatch, sp_rank: int, sp_size: int, cp_size: int = 1) -> MicroBatch:
    """Keep the ``sp_rank``-th of ``sp_size`` equal slices of a packed row (``core/slices.py``).

    ``cu_seqlens``, ``prefix`` and ``max_length`` still describe the whole row, all of which attention sees.
    """
    if sp_size == 1:
        return batch
    held = slice_positions(batch.cu_seqlens, sp_rank, sp_size, cp_size)
    place = torch.full_like(batch.input_ids, -1)
    place[held] = torch.arange(len(held))
    mine = place[batch.loss_positions] >= 0
    values: dict[str, Tensor | None] = {name: getattr(batch, name) for name in LOSS_TOKEN_FIELDS + TOP_TOKEN_FIELDS}
    return replace(
        batch,
        input_ids=batch.input_ids[held],
        position_ids=batch.position_ids[held],
        loss_positions=place[batch.loss_positions[mine]],
        labels=batch.labels[mine],
        sequence=batch.sequence[mine],
        places=mine.nonzero().squeeze(1),
        width=sp_size,
        place=sp_rank,
        **{name: None if value is None else value[mine] for name, value in values.items()},  # type: ignore[arg-type]
    )


def padding_sample(token_id: int, sample_id: int = -1) -> TrainingSample:
    """A sample of two tokens without loss, which no count or metric includes."""
    prompt = Prompt(row=-1, ids=(token_id,), text="")
    sample = Sample(
        sample_id=sample_id,
        group_id=-1,
        prompt=prompt,
        response_ids=torch.tensor([token_id]),
        loss_mask=torch.tensor([False]),
        is_padding=True,
    )
    return TrainingSample(sample)
