"""Where a rank sits is arithmetic on a value, so a thousand ranks are looked at in one process."""

import itertools

import pytest

from rlmodule.core.layout import Layout

SHAPES = [(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 3, 2), (1, 4, 2), (64, 4, 4)]  # data, sequence, tensor


def ranks(dp, sp, tp):
    world = dp * sp * tp
    return [Layout(world, rank, tp_size=tp, sp_size=sp) for rank in range(world)]


@pytest.mark.parametrize(("dp", "sp", "tp"), SHAPES)
def test_every_place_is_taken_by_exactly_one_rank(dp, sp, tp):
    places = [(r.dp_rank, r.sp_rank, r.tp_rank) for r in ranks(dp, sp, tp)]
    assert sorted(places) == list(itertools.product(range(dp), range(sp), range(tp)))
    assert all(r.dp_size == dp for r in ranks(dp, sp, tp))


@pytest.mark.parametrize(("dp", "sp", "tp"), SHAPES)
def test_tensor_ranks_are_nearest_then_sequence_then_data(dp, sp, tp):
    for rank, layout in enumerate(ranks(dp, sp, tp)):
        assert rank == (layout.dp_rank * sp + layout.sp_rank) * tp + layout.tp_rank


@pytest.mark.parametrize(("dp", "sp", "tp"), SHAPES)
def test_one_rank_speaks_for_each_data_rank_and_one_for_all(dp, sp, tp):
    assert [r.dp_rank for r in ranks(dp, sp, tp) if r.has_outputs] == list(range(dp))
    assert [r.rank for r in ranks(dp, sp, tp) if r.is_rank_zero] == [0]


def test_a_layout_that_does_not_tile_is_our_own_bug():
    with pytest.raises(AssertionError, match="does not tile"):
        Layout(6, tp_size=2, sp_size=2)
    with pytest.raises(AssertionError, match="outside its world"):
        Layout(2, rank=2)
