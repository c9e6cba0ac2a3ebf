"""Fused parameters are the pieces they are made of, whoever has which part; gradients are summed many at a time."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from strategies.parts import gradients
from strategies.parts.gradients import fill_missing, sum_over
from strategies.parts.pieces import Piece, fill
from tests.helpers.ranks import run_on_ranks

GROUPS, QUERIES, WIDTH, HIDDEN, RANKS = 4, 3, 2, 5, 2


def heads(start, stop):
    """Of a projection fused group by group: rows of heads ``start`` to ``stop`` of each."""
    return lambda fused: fused.view(-1, QUERIES + 2, WIDTH, *fused.shape[1:])[:, start:stop]


PIECES = (
    Piece(("q",), 0, heads(0, QUERIES)),
    Piece(("k",), 0, heads(QUERIES, QUERIES + 1)),
    Piece(("v",), 0, heads(QUERIES + 1, QUERIES + 2)),
)
NAMES = {"q": GROUPS * QUERIES * WIDTH, "k": GROUPS * WIDTH, "v": GROUPS * WIDTH}


def numbers(shape=(HIDDEN,)):
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn(rows, *shape, generator=rng) for name, rows in NAMES.items()}


@pytest.mark.parametrize("shape", [(HIDDEN,), ()], ids=["weights", "biases"])
def test_pieces_of_all_ranks_are_the_whole_tensors(shape):
    whole, rows = numbers(shape), sum(NAMES.values())
    parts = [nn.Parameter(torch.full((rows // RANKS, *shape), torch.nan)) for _ in range(RANKS)]
    for rank, part in enumerate(parts):
        fill([(part, PIECES)], whole.__getitem__, rank, RANKS)
        assert part.isfinite().all(), "every number belongs to a piece"
    for piece in PIECES:
        together = torch.cat([piece.of(part.detach()) for part in parts])
        assert torch.equal(together, whole[piece.names[0]])


def test_a_piece_written_is_the_piece_read_and_no_other_changes():
    part = torch.zeros(sum(NAMES.values()), HIDDEN)
    new = torch.randn(NAMES["k"], HIDDEN)
    PIECES[1].put(part, new)
    assert torch.equal(PIECES[1].of(part), new)
    assert not PIECES[0].of(part).any()
    assert not PIECES[2].of(part).any()


def summed(rank):
    parameters = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    parameters[0].grad = torch.full((3, 2), float(rank + 1))
    parameters[2].grad = torch.tensor([1.0, float(rank)])
    if rank == 0:
        parameters[1].grad = torch.arange(4.0)
    fill_missing(parameters)
    calls, reduce = [], dist.all_reduce
    dist.all_reduce = lambda tensor, group: (calls.append(len(tensor)), reduce(tensor, group=group))
    sum_over([p.grad for p in parameters], dist.group.WORLD, torch.device("cpu"), factor=0.5)
    return [p.grad.flatten().tolist() for p in parameters], calls


@pytest.mark.ranks
@pytest.mark.parametrize(("bucket", "exchanges"), [(100, [12]), (7, [6, 6]), (1, [6, 4, 2])])
def test_means_come_in_as_few_exchanges_as_buckets(monkeypatch, bucket, exchanges):
    """Also of a parameter that no token of one process has reached."""
    monkeypatch.setattr(gradients, "BUCKET_NUMEL", bucket)
    for means, calls in run_on_ranks(2, summed):
        assert means == [[1.5] * 6, [0.0, 0.5, 1.0, 1.5], [1.0, 0.5]]
        assert calls == exchanges
