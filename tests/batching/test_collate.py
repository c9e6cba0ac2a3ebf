"""Samples end to end in one row: where each token goes, which position predicts it, and what a slice of the row keeps."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.batching.collate import (
    IGNORED_LABEL,
    DynamicCollator,
    pack_rows,
    pad_to_multiple,
    padding_sample,
    shard_for_rank,
    shifted_labels,
)
from rlmodule.batching.sampler import RankShare
from rlmodule.core.types import Prompt, Sample, StepTotals, TrainingSample
from tests.helpers.tiny import grouped_rows, mixed_rows

TOTALS = StepTotals(tokens=100, sequences=8, group_tokens={0: 5, 1: 9, 2: 20, 3: 13})


def row_of(prompt, response, mask=None, group=0, **values):
    """A row with given ids; ``values`` are advantage, old_logprob, ref_logprob by response token."""
    sample = Sample(
        sample_id=0,
        group_id=group,
        prompt=Prompt(row=0, ids=tuple(prompt), text=""),
        response_ids=torch.tensor(response),
        loss_mask=torch.tensor(mask or [True] * len(response)),
    )
    return TrainingSample(sample, **{name: torch.tensor(value) for name, value in values.items()})


def test_two_samples_end_to_end():
    """Worked by hand: prompt 10 11, response 20 21 22 of which the middle one is an observation; prompt 12, response 23."""
    first = row_of([10, 11], [20, 21, 22], [True, False, True], group=1, advantage=[1.0, 2.0, 3.0])
    second = row_of([12], [23], group=2, advantage=[4.0])
    batch = pack_rows([first, second], TOTALS, positions=(5, 3))
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 22, 12, 23]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert batch.loss_positions.tolist() == [1, 3, 5], "the place before each loss token"
    assert batch.labels.tolist() == [20, 22, 23]
    assert batch.sequence.tolist() == [0, 0, 1]
    assert batch.loss_tokens.tolist() == [2, 1]
    assert batch.group_tokens.tolist() == [9, 20], "of the whole mini-batch"
    assert batch.advantage.tolist() == [1.0, 3.0, 4.0]
    assert (batch.old_logprob, batch.ref_logprob) == (None, None)
    assert batch.max_length == 5
    assert batch.positions == (5, 3)
    assert shifted_labels(batch).tolist() == [-100, 20, -100, 22, -100, 23, -100]
    assert IGNORED_LABEL == -100


def test_samples_of_a_group_share_their_prompt():
    """Worked by hand: prompt 10 11 12 with responses 20 21 and 30; between them a sample of a group of its own.

    10 11 are computed once. 12 predicts the first token of either response, so each has its own; the last token of a
    response predicts nothing.
    """
    rows = [
        row_of([10, 11, 12], [20, 21], [False, True], group=1, advantage=[1.0, 2.0]),
        row_of([13, 14], [22], group=2, advantage=[3.0]),
        row_of([10, 11, 12], [30], group=1, advantage=[4.0]),
    ]
    batch = pack_rows(rows, TOTALS, positions=(5, 3, 9), share_prompts=True)
    assert batch.input_ids.tolist() == [10, 11, *[12, 20], *[13, 14, 22], *[12]]
    assert batch.position_ids.tolist() == [0, 1, *[2, 3], *[0, 1, 2], *[2]]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 7, 8]
    assert batch.prefix.tolist() == [-1, 0, -1, 0]
    assert batch.loss_positions.tolist() == [3, 5, 7]
    assert batch.labels.tolist() == [21, 22, 30]
    assert batch.sequence.tolist() == [0, 1, 2], "samples, not segments"
    assert batch.loss_tokens.tolist() == [1, 1, 1]
    assert batch.advantage.tolist() == [2.0, 3.0, 4.0]
    assert batch.max_length == 3
    padded = pad_to_multiple(batch, 5, pad_token_id=0)
    assert padded.cu_seqlens.tolist() == [0, 2, 4, 7, 8, 10]
    assert padded.prefix.tolist() == [-1, 0, -1, 0, -1], "padding is nobody's response"


@pytest.mark.parametrize(
    "rows",
    [
        [row_of([10], [20], group=1), row_of([10], [21], group=1)],
        [row_of([10, 11], [20], group=1), row_of([10, 12], [21], group=1)],
        [row_of([10, 11], [20], group=1), row_of([10, 11], [21], group=2)],
    ],
    ids=["a prompt of one token", "other prompts", "other groups"],
)
def test_what_cannot_be_shared_is_laid_out_as_ever(rows):
    plain, shared = (pack_rows(rows, TOTALS, share_prompts=share) for share in (False, True))
    assert shared.prefix is None
    assert torch.equal(shared.input_ids, plain.input_ids)
    assert torch.equal(shared.cu_seqlens, plain.cu_seqlens)


def test_types_are_those_the_kernels_want():
    batch = pack_rows(mixed_rows(), TOTALS)
    assert batch.cu_seqlens.dtype == torch.int32
    for name in ("input_ids", "position_ids", "loss_positions", "labels", "sequence", "loss_tokens", "group_tokens"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("old_logprob", "ref_logprob", "advantage"):
        assert getattr(batch, name).dtype == torch.float32, name


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 63)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_every_loss_token_is_predicted_by_the_place_before_it(shapes):
    """For any lengths and masks: the label of a loss position is the token that follows it, within its own sample."""
    rows = [
        row_of(
            range(100 * i, 100 * i + p), range(100 * i + 50, 100 * i + 50 + r), [bool(bits >> t & 1) for t in range(r)]
        )
        for i, (p, r, bits) in enumerate(shapes)
    ]
    batch = pack_rows(rows, TOTALS)
    assert torch.equal(batch.input_ids[batch.loss_positions + 1], batch.labels)
    starts = batch.cu_seqlens[batch.sequence]
    ends = batch.cu_seqlens[batch.sequence + 1]
    assert bool(((starts <= batch.loss_positions) & (batch.loss_positions + 1 < ends)).all())
    assert batch.loss_tokens.tolist() == [int(row.sample.loss_mask.sum()) for row in rows]
    assert len(batch.labels) == int(batch.loss_tokens.sum())
    lengths = batch.cu_seqlens.diff().tolist()
    assert batch.position_ids.tolist() == [t for n in lengths for t in range(n)]


def test_a_prompt_without_tokens_is_our_own_bug():
    with pytest.raises(AssertionError, match="prompts must not be empty"):
        pack_rows([row_of([], [1])], TOTALS)


def test_a_row_that_lacks_a_value_the_others_have_is_our_own_bug():
    with pytest.raises(AssertionError, match="lacks a value"):
        pack_rows([row_of([1], [2], advantage=[1.0]), row_of([1], [2])], TOTALS)


def test_a_padding_sample_needs_no_values():
    batch = pack_rows([row_of([1], [2], advantage=[1.0]), padding_sample(0)], TOTALS)
    assert batch.advantage.tolist() == [1.0]
    assert batch.loss_tokens.tolist() == [1, 0]


def test_no_rows_make_a_dummy_of_two_tokens_without_loss():
    dummy = DynamicCollator(pad_token_id=7).pack([], TOTALS)
    assert dummy.input_ids.tolist() == [7, 7]
    assert dummy.loss_tokens.tolist() == [0]
    assert dummy.group_tokens.tolist() == [0]
    assert len(dummy.labels) == len(dummy.loss_positions) == 0
    assert dummy.positions == ()
    assert [len(x) for x in (dummy.advantage, dummy.old_logprob, dummy.ref_logprob)] == [0, 0, 0], "no loss misses any"


def test_the_collator_keeps_the_plan():
    rows = mixed_rows()
    share = RankShare(((1, 4), (), (0,)), TOTALS, {"balance/num_micro_steps": 3.0})
    batch = DynamicCollator(pad_token_id=0)((share, [[rows[1], rows[4]], [], [rows[0]]]))
    assert [m.positions for m in batch.micro_batches] == [(1, 4), (), (0,)]
    assert batch.totals is TOTALS
    assert batch.metrics == {"balance/num_micro_steps": 3.0}


@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 8, 100])
def test_padding_is_a_segment_of_its_own(multiple):
    batch = pack_rows(mixed_rows(), TOTALS)
    padded = pad_to_multiple(batch, multiple, pad_token_id=9)
    count = len(batch.input_ids)
    missing = -count % multiple
    assert len(padded.input_ids) == count + missing
    assert padded.input_ids[count:].tolist() == [9] * missing
    assert padded.position_ids[count:].tolist() == list(range(missing))
    assert padded.cu_seqlens.tolist() == batch.cu_seqlens.tolist() + [count + missing] * (missing > 0)
    assert len(padded.loss_tokens) == len(padded.cu_seqlens) - 1
    for name in ("labels", "loss_positions", "sequence", "advantage", "old_logprob"):
        assert torch.equal(getattr(padded, name), getattr(batch, name)), name
    assert padded.max_length == max(batch.max_length, missing)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("sp_size", [1, 2, 3, 4])
def test_slices_put_together_are_the_row(sp_size, share_prompts):
    """Everything about a loss token goes with the position that predicts it, and nothing gets lost at a border."""
    rows = [*mixed_rows(), *grouped_rows([3, 5], [4, 2, 6])]
    whole = pad_to_multiple(pack_rows(rows, TOTALS, share_prompts=share_prompts), sp_size, 0)
    parts = [shard_for_rank(whole, rank, sp_size) for rank in range(sp_size)]
    width = len(whole.input_ids) // sp_size
    assert all(len(part.input_ids) == width for part in parts)
    for name in ("input_ids", "position_ids", "labels", "sequence", "advantage", "old_logprob", "ref_logprob"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name
    moved = torch.cat([part.loss_positions + rank * width for rank, part in enumerate(parts)])
    assert torch.equal(moved, whole.loss_positions)
    for part in parts:  # of the whole row, which every rank of the group attends over
        assert torch.equal(part.cu_seqlens, whole.cu_seqlens)
        assert torch.equal(part.loss_tokens, whole.loss_tokens)
        assert part.max_length == whole.max_length


def test_a_row_that_does_not_split_is_our_own_bug():
    with pytest.raises(AssertionError, match="do not split over 2 sequence ranks"):
        shard_for_rank(pack_rows([row_of([1], [2, 3])], TOTALS), 0, 2)


def test_values_that_are_absent_stay_absent_in_a_slice():
    bare = replace(mixed_rows()[0], advantage=None, ref_logprob=None)
    part = shard_for_rank(pad_to_multiple(pack_rows([bare], TOTALS), 2, 0), 1, 2)
    assert (part.advantage, part.ref_logprob) == (None, None)
    assert part.old_logprob is not None
