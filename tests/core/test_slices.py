"""A cut of a row gives each position to one slice, and every part the same work."""

from __future__ import annotations

import pytest
import torch

from rlmodule.core.slices import part_positions, slice_positions


def borders(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("lengths", [(16,), (7, 3, 10, 4, 8), (1,) * 16, (0, 30, 2), (5, 59)])
@pytest.mark.parametrize(("size", "parts"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)])
def test_every_position_is_in_one_slice_and_all_slices_are_as_long(lengths, size, parts):
    total = sum(lengths)
    cut = borders(*lengths, *([-total % size] if total % size else []))
    slices = [slice_positions(cut, rank, size, parts) for rank in range(size)]
    assert {len(held) for held in slices} == {int(cut[-1]) // size}
    assert torch.cat(slices).sort().values.tolist() == list(range(int(cut[-1])))


def test_one_part_is_the_row_in_order():
    assert [slice_positions(borders(5, 7), rank, 3).tolist() for rank in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_a_part_has_a_chunk_from_each_end_of_a_segment_and_what_is_left_in_runs():
    """Ten and six tokens in two parts: chunks of two and of one; two tokens of each segment are left."""
    first, second = part_positions(borders(10, 6), 2).tolist()
    assert first == [0, 1, 6, 7, 8, 9, 10, 13]
    assert second == [2, 3, 4, 5, 11, 12, 14, 15]


def work_of(held: torch.Tensor, cut: torch.Tensor) -> int:
    """Keys that the queries of a part see, together."""
    segment = torch.searchsorted(cut.long(), held, right=True) - 1
    return int((held - cut.long()[segment] + 1).sum())


@pytest.mark.parametrize("lengths", [(4096,), (3000, 500, 300, 200, 96), (2048, 1, 1, 2046)])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_have_the_same_work(lengths, parts):
    cut = borders(*lengths)
    work = [work_of(held, cut) for held in part_positions(cut, parts)]
    assert max(work) < 1.02 * sum(work) / parts


def test_contiguous_parts_would_not():
    """The last of four has the queries that see most: 7 of 16 chunks of work instead of 4."""
    cut = borders(4096)
    work = [work_of(held, cut) for held in torch.arange(4096).view(4, -1)]
    assert max(work) == pytest.approx(7 / 4 * sum(work) / 4, rel=0.001)
