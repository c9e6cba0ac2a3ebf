"""Every sample of a packed row is whole on one rank, its prefix with it, and every token finds its way there and back."""

import pytest
import torch

from rlmodule.core.slices import slice_positions
from rlmodule.ops.segments import SegmentBuckets
from rlmodule.ops.whole_samples import whole_samples

ROWS = {
    "many": ([5, 1, 8, 3, 3, 4], None),
    "one": ([24], None),
    "shared prompts": ([4, 3, 5, 2, 6, 4], [-1, 0, 0, -1, 3, 0]),
    "an empty segment": ([7, 0, 9, 8], None),
}


@pytest.mark.parametrize(("size", "num_parts"), [(2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("name", ROWS)
def test_samples_are_whole_and_all_there(name, size, num_parts):
    lengths, prefix = ROWS[name]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    row = SegmentBuckets.from_cu_seqlens(borders, prefix=None if prefix is None else torch.tensor(prefix))
    plans = [whole_samples(row, rank, size, num_parts) for rank in range(size)]
    slices = [slice_positions(borders, rank, size, num_parts) for rank in range(size)]
    sent = [held[plan.leaving].split(plan.sent) for held, plan in zip(slices, plans, strict=True)]
    held = list[int]()
    for rank, plan in enumerate(plans):
        arrived = torch.cat([of_rank[rank] for of_rank in sent])
        assert plan.received == tuple(len(of_rank[rank]) for of_rank in sent)
        own = arrived[plan.arriving]
        assert own.tolist() == sorted(own.tolist()), "in the order of the row"
        held += own.tolist()
        segment = torch.searchsorted(borders, own, right=True) - 1
        numbers = segment.unique()
        assert plan.segments.length.sum() == len(own)
        assert [n for n in plan.segments.length.tolist() if n] == [lengths[n] for n in numbers if lengths[n]]
        for start, length, number in zip(plan.segments.start, plan.segments.length, numbers, strict=False):
            assert own[start : start + length].tolist() == list(range(borders[number], borders[number] + length))
        for start, length in zip(plan.segments.prefix_start, plan.segments.prefix_length, strict=True):
            assert length == 0 or int(segment[start]) in {n for n in prefix or () if n >= 0}
    assert sorted(held) == list(range(sum(lengths)))


def test_the_longest_samples_are_dealt_first():
    row = SegmentBuckets.from_cu_seqlens(torch.tensor([0, 9, 10, 12, 20]))
    assert [int(whole_samples(row, rank, 2, 1).segments.length.sum()) for rank in range(2)] == [10, 10]
