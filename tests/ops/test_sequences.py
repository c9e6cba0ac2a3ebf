"""Sums and means over the tokens of each sequence."""

import torch

from rlmodule.ops.sequences import mean_by_sequence, sum_by_sequence

SEQUENCE = torch.tensor([0, 0, 2, 0, 2])


def test_sums_by_hand():
    x = torch.tensor([1.0, 2.0, 10.0, 3.0, 20.0])
    assert sum_by_sequence(x, SEQUENCE, 4).tolist() == [6, 0, 30, 0]


def test_the_mean_divides_by_the_whole_sequence_and_comes_back_to_each_token():
    """Sequence 2 has four loss tokens, of which two are here; sequence 1 has none."""
    x = torch.tensor([1.0, 2.0, 10.0, 3.0, 20.0], requires_grad=True)
    out = mean_by_sequence(x, SEQUENCE, torch.tensor([3, 0, 4]))
    assert out.tolist() == [2, 2, 7.5, 2, 7.5]
    out.sum().backward()
    assert x.grad.tolist() == [1, 1, 0.5, 1, 0.5]


def test_no_token_no_trouble():
    empty = torch.empty(0)
    assert mean_by_sequence(empty, torch.empty(0, dtype=torch.int64), torch.tensor([0])).shape == (0,)
