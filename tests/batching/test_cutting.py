"""A packed row that is cut is the rows that its samples would have been packed into; no sample and no token is lost."""

from dataclasses import fields

import pytest
import torch

from rlmodule.batching.collate import pack_rows
from rlmodule.batching.cutting import cut, is_one_unit
from rlmodule.core.types import StepTotals
from tests.helpers.tiny import grouped_rows, mixed_rows

TOTALS = StepTotals(tokens=50, sequences=8, group_tokens={0: 9, 1: 11, 2: 6, 3: 24})


def assert_equal_rows(got, expected):
    for field in fields(expected):
        here, there = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(there, torch.Tensor) and (
            here is not None or len(there)
        ):  # no loss token: nothing, or none of it
            torch.testing.assert_close(here, there, rtol=0, atol=0, msg=field.name)
        elif here is not None:
            assert here == there, field.name


@pytest.mark.parametrize("max_tokens", [1, 7, 20, 33])
def test_a_part_is_its_samples_packed_by_themselves(max_tokens):
    rows = mixed_rows()
    whole = pack_rows(rows, TOTALS, tuple(range(10, 18)))
    first = 0
    for part in cut(whole, max_tokens):
        count = len(part.loss_tokens)
        assert len(part.input_ids) <= max_tokens or count == 1, "only a sample that is longer by itself is"
        own = slice(first, first + count)
        assert_equal_rows(part, pack_rows(rows[own], TOTALS, tuple(range(10, 18))[own]))
        first += count
    assert first == len(rows), "every sample is in one part"


def test_a_shared_prompt_goes_with_every_part_that_continues_it():
    rows = grouped_rows((5, 4), (3, 6, 2))
    whole = pack_rows(rows, TOTALS, share_prompts=True)
    parts = cut(whole, 16)
    assert len(parts) > 1 and max(len(part.input_ids) for part in parts) <= 16
    for name in ("labels", "advantage"):
        torch.testing.assert_close(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
    for part in parts:
        for segment, prefix in enumerate(part.prefix.tolist()):
            start, end = part.cu_seqlens[segment : segment + 2].tolist()
            before = 0 if prefix < 0 else int(part.cu_seqlens[prefix + 1] - part.cu_seqlens[prefix])
            assert part.position_ids[start:end].tolist() == list(range(before, before + end - start))
        own = [s for s in range(len(part.prefix)) if s not in part.prefix.tolist()]
        starts = part.cu_seqlens[own][part.sequence.cpu()]
        ends = part.cu_seqlens[[s + 1 for s in own]][part.sequence.cpu()]
        assert ((part.loss_positions >= starts) & (part.loss_positions < ends)).all(), "in its sample's segment"


def test_groups_stay_together_where_they_must():
    rows = grouped_rows((5, 4, 2), (3, 6))  # the rows of a group do not lie together
    parts = cut(pack_rows(rows, TOTALS), 1, keep_groups=True)
    assert [sorted(part.group.tolist()) for part in parts] == [[0, 0]] * 3
    assert all(is_one_unit(part, keep_groups=True) and not is_one_unit(part) for part in parts)
    assert sorted(i for part in parts for i in part.sample_id.tolist()) == list(range(6))
