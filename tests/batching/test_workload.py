"""Laws of the cost model."""

import numpy as np
import pytest
import torch

from rlmodule.batching.workload import ModelShape, Workload

DENSE = {
    "hidden_size": 8,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "intermediate_size": 10,
    "vocab_size": 100,
}


def test_default_cost_is_exact_far_beyond_32_bits():
    lengths = [1, 4096, 10**6, 10**7]
    expected = [24576 * n + n * n for n in lengths]  # Python integers
    assert Workload().cost(lengths, lengths).tolist() == expected


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_any_kind_of_numbers_gives_the_same_cost(kind):
    assert Workload().cost(kind([3, 5]), kind([1, 1])).tolist() == [24576 * 3 + 9, 24576 * 5 + 25]


def test_flops_of_a_dense_model_worked_by_hand():
    """One layer, hidden 8, 4 query and 2 key/value heads of width 2, MLP of 10, 100 words; 3 tokens, 1 with a loss."""
    shape = ModelShape(**{**DENSE, "num_layers": 1})
    query_and_output, key_and_value, mlp = 2 * 8 * 8, 2 * 8 * 4, 3 * 8 * 10
    matmuls = 3 * (query_and_output + key_and_value + mlp)
    pairs = 1 + 2 + 3
    attention = 2 * pairs * 4 * 2  # scores and weighted values, 4 heads of width 2
    head = 8 * 100
    # 2 FLOPs per multiply-add, backward costs twice the forward pass.
    assert shape.flops([3], [1]).tolist() == [6 * (matmuls + attention + head)]


def test_cost_is_linear_plus_quadratic_in_the_length():
    """Third differences of a polynomial of degree two vanish, second differences are constant and positive."""
    cost = ModelShape(**DENSE).flops(np.arange(1, 9), np.zeros(8))
    second = np.diff(cost, n=2)
    assert (second == second[0]).all()
    assert second[0] > 0


def test_windowed_layers_are_linear_past_the_window():
    windowed = ModelShape(**DENSE, sliding_window=4, num_windowed_layers=3)
    lengths = np.arange(1, 12)
    cost = windowed.flops(lengths, np.zeros(11))
    assert (np.diff(cost, n=2)[3:] == 0).all()
    assert (cost[:4] == ModelShape(**DENSE).flops(lengths, np.zeros(11))[:4]).all(), "a window longer than the text"


def test_layers_with_and_without_window_add_up():
    lengths, none = [5, 50], [0, 0]
    full, all_windowed = ModelShape(**DENSE), ModelShape(**DENSE, sliding_window=4, num_windowed_layers=3)
    mixed = ModelShape(**DENSE, sliding_window=4, num_windowed_layers=1)
    expected = (2 * full.flops(lengths, none) + all_windowed.flops(lengths, none)) / 3
    np.testing.assert_allclose(mixed.flops(lengths, none), expected, rtol=1e-15)


def test_only_active_experts_count():
    two_experts = ModelShape(**DENSE, num_experts_per_token=2)
    wider = ModelShape(**{**DENSE, "intermediate_size": 20})
    assert two_experts.flops([7], [3]).tolist() == wider.flops([7], [3]).tolist()


def test_the_head_is_paid_for_loss_tokens_only():
    shape = ModelShape(**DENSE)
    with_loss, without = shape.flops([9, 9], [5, 0])
    assert with_loss - without == 6 * 5 * 8 * 100


def test_sharing_key_value_heads_makes_tokens_cheaper():
    shared = ModelShape(**{**DENSE, "num_kv_heads": 1}).flops([9], [0])
    assert shared < ModelShape(**DENSE).flops([9], [0])


def test_a_model_of_seven_billion_weights_takes_six_flops_per_weight_and_token():
    """Llama-2-7B without its embedding: 6.6e9 weights; attention is small at 128 tokens."""
    llama = ModelShape(4096, 32, 32, 32, 128, 11008, 32000)
    per_token = llama.flops([128], [128])[0] / 128
    assert per_token == pytest.approx(6 * 6.6e9, rel=0.01)


@pytest.mark.parametrize("wrong", [{"num_layers": 0}, {"num_windowed_layers": 2}, {"num_windowed_layers": 4}])
def test_an_impossible_shape_is_refused(wrong):
    with pytest.raises(AssertionError):
        ModelShape(**{**DENSE, **wrong})
