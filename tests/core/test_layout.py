"""Where a rank sits is arithmetic on a value, so a thousand ranks are looked at in one process."""

import itertools
from collections import Counter

import pytest

from rlmodule.core.layout import Layout, place_of, widths_of

SHAPES = [
    (1, 1, 1, 1),
    (1, 4, 1, 1),
    (1, 2, 2, 1),
    (1, 2, 3, 2),
    (1, 1, 4, 2),
    (3, 2, 1, 2),
    (2, 3, 2, 1),
    (1, 64, 4, 4),
    (8, 16, 2, 4),
    (4, 256, 1, 1),
]  # pipeline, data, sequence, tensor


def ranks(pp, dp, sp, tp, ep=1):
    world = pp * dp * sp * tp
    return [Layout(world, rank, tp_size=tp, sp_size=sp, pp_size=pp, ep_size=ep) for rank in range(world)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_place_is_taken_by_exactly_one_rank(shape):
    places = [(r.pp_rank, r.dp_rank, r.sp_rank, r.tp_rank) for r in ranks(*shape)]
    assert sorted(places) == list(itertools.product(*map(range, shape)))
    assert {(r.pp_size, r.dp_size, r.sp_size, r.tp_size) for r in ranks(*shape)} == {shape}


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_ranks_are_nearest_then_sequence_then_data_then_stages(shape):
    _, dp, sp, tp = shape
    for rank, layout in enumerate(ranks(*shape)):
        assert rank == ((layout.pp_rank * dp + layout.dp_rank) * sp + layout.sp_rank) * tp + layout.tp_rank


@pytest.mark.parametrize("shape", SHAPES)
def test_one_rank_speaks_for_each_data_rank_and_one_for_all(shape):
    assert [r.dp_rank for r in ranks(*shape) if r.has_outputs] == list(range(shape[1]))
    assert [r.rank for r in ranks(*shape) if r.is_rank_zero] == [0]


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_ranks_and_stages_repeat_the_tokens_of_a_data_and_sequence_rank(shape):
    pp, dp, sp, tp = shape
    repeated = Counter(r.dp_sp_rank for r in ranks(*shape))
    assert repeated == dict.fromkeys(range(dp * sp), pp * tp)
    by_tokens = {(r.dp_rank, r.sp_rank): r.dp_sp_rank for r in ranks(*shape)}
    assert len(set(by_tokens.values())) == dp * sp


@pytest.mark.parametrize(
    ("shape", "ep"), [((1, 4, 1, 1), 2), ((1, 4, 1, 1), 4), ((1, 2, 1, 2), 4), ((2, 8, 1, 2), 8), ((4, 64, 2, 2), 16)]
)
def test_experts_are_shared_by_neighbours_within_one_stage_and_nothing_else_moves(shape, ep):
    for layout, plain in zip(ranks(*shape, ep=ep), ranks(*shape), strict=True):
        assert (layout.dp_rank, layout.sp_rank, layout.tp_rank) == (plain.dp_rank, plain.sp_rank, plain.tp_rank)
        assert layout.dp_size == plain.dp_size
    groups = itertools.groupby(ranks(*shape, ep=ep), key=lambda r: r.rank // ep)
    for _, group in groups:
        members = list(group)
        assert [r.ep_rank for r in members] == list(range(ep))
        assert len({r.pp_rank for r in members}) == 1, "a group of experts lies in one stage"


def test_sizes_name_every_dimension():
    layout = Layout(1024, rank=700, tp_size=4, sp_size=2, pp_size=8, ep_size=16)
    assert layout.sizes == {
        "world_size": 1024,
        "dp_size": 16,
        "sp_size": 2,
        "tp_size": 4,
        "pp_size": 8,
        "ep_size": 16,
        "cp_size": 1,
    }
    assert layout.stage_size == 128


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tp_size": 2, "sp_size": 2}, "does not tile"),
        ({"pp_size": 4}, "does not tile"),
        ({"ep_size": 4}, "ep_size must divide"),
        ({"pp_size": 3, "ep_size": 3}, "ep_size must divide"),
        ({"tp_size": 0}, "below 1"),
        ({"rank": 6}, "outside its world"),
        ({"max_sp_size": 4}, "a power of two that divides dp_size"),
        ({"sp_size": 2, "max_sp_size": 2}, "only data ranks share rows by plan"),
        ({"max_sp_size": 2, "max_cp_size": 3}, "max_cp_size must divide max_sp_size"),
    ],
)
def test_a_layout_that_does_not_tile_is_our_own_bug(sizes, reason):
    with pytest.raises(AssertionError, match=reason):
        Layout(6, **sizes)


def test_neighbours_that_share_a_row_begin_at_a_multiple_of_their_number():
    assert [widths_of(ranks) for ranks in (1, 6, 8, 12)] == [[1], [1, 2], [1, 2, 4, 8], [1, 2, 4]]
    for width in widths_of(8):
        assert [place_of(rank, width) for rank in range(8)] == list(range(width)) * (8 // width)
    assert "rows over up to 4 of them" in Layout(8, max_sp_size=4).in_words
    assert "rows over" not in Layout(8).in_words


def test_a_row_of_more_neighbours_than_exchange_heads_has_parts():
    layout = Layout(16, max_sp_size=16, max_cp_size=4)
    assert [layout.parts_of(width) for width in widths_of(16)] == [1, 1, 1, 2, 4]
    assert "rows over up to 16 of them (4 by heads x 4 by context)" in layout.in_words
    assert [Layout(8, max_sp_size=8, max_cp_size=8).parts_of(width) for width in widths_of(8)] == [1, 2, 4, 8]
