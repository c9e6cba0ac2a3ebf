"""The few exchanges between data ranks: everybody gets what was meant for him, in rank order; alone nothing is sent."""

from functools import partial

import pytest
import torch

from strategies.parts.collectives import GroupCollectives, LocalCollectives
from strategies.parts.mesh import current_layout
from tests.helpers.ranks import run_on_ranks

CPU = torch.device("cpu")


def test_alone_every_exchange_is_with_oneself():
    alone, rows = LocalCollectives(), torch.arange(6.0).reshape(2, 3)
    assert torch.equal(alone.gather_rows(rows), rows[None])
    assert alone.gather_objects("x") == ["x"]
    assert alone.exchange(["x"]) == ["x"]
    assert alone.broadcast("x") == "x"
    assert current_layout().world_size == 1


def exchanges(rank, world_size):
    together = GroupCollectives(CPU)
    rows = torch.full((2, 3), float(rank), dtype=torch.float64)
    return {
        "size": together.size,
        "rows": together.gather_rows(rows).tolist(),
        # Parcels of unlike sizes, an empty one among them.
        "objects": together.gather_objects({"rank": rank, "payload": "x" * (1000 * rank)}),
        "exchange": together.exchange([None if to == rank else f"{rank} to {to}" for to in range(world_size)]),
        "broadcast": together.broadcast(("from", rank)),
        "layout": (current_layout().world_size, current_layout().rank),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_everybody_gets_what_was_meant_for_him(world_size):
    for rank, got in enumerate(run_on_ranks(world_size, partial(exchanges, world_size=world_size))):
        others = range(world_size)
        assert got["size"] == world_size
        assert got["rows"] == [[[float(r)] * 3] * 2 for r in others]
        assert got["objects"] == [{"rank": r, "payload": "x" * (1000 * r)} for r in others]
        assert got["exchange"] == [None if r == rank else f"{r} to {rank}" for r in others]
        assert got["broadcast"] == ("from", 0)
        assert got["layout"] == (world_size, rank)


def send_tensors(rank):
    together = GroupCollectives(CPU)
    return [x.tolist() for x in together.exchange([torch.arange(rank + to) for to in range(2)])]


@pytest.mark.ranks
def test_tensors_travel_whole():
    assert run_on_ranks(2, send_tensors) == [[[], [0]], [[0], [0, 1]]]


def wrong_number(rank):
    with pytest.raises(AssertionError, match="1 payloads for 2 ranks"):
        GroupCollectives(CPU).exchange(["only one"])
    return True


@pytest.mark.ranks
def test_a_parcel_too_few_is_our_own_bug():
    assert run_on_ranks(2, wrong_number) == [True, True]
