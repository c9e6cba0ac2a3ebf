"""Laws of the cost model."""

import numpy as np
import pytest
import torch

from rlmodule.batching.workload import AttentionShape, ModelShape, Workload


def dense(num_layers=3, num_kv_heads=2, mlp=10, windows=()):
    """A transformer of hidden size 8, 4 query heads of width 2, a gated MLP and 100 words.

    ``windows`` of the first layers; the others see all tokens before them.
    """
    projections = 2 * 8 * 8 + 2 * 8 * 2 * num_kv_heads
    kinds = [*windows, *[None] * (num_layers - len(windows))]
    attention = tuple(AttentionShape(kinds.count(w), 4, num_kv_heads, 2, 2, w) for w in dict.fromkeys(kinds))
    return ModelShape(num_layers * (projections + 3 * 8 * mlp), 8 * 100, attention)


def test_default_cost_is_exact_far_beyond_32_bits():
    lengths = [1, 4096, 10**6, 10**7]
    expected = [24576 * n + n * n for n in lengths]  # Python integers
    assert Workload().cost(lengths, lengths).tolist() == expected


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_any_kind_of_numbers_gives_the_same_cost(kind):
    assert Workload().cost(kind([3, 5]), kind([1, 1])).tolist() == [24576 * 3 + 9, 24576 * 5 + 25]


def test_flops_of_a_dense_model_worked_by_hand():
    """One layer, hidden 8, 4 query and 2 key/value heads of width 2, MLP of 10, 100 words; 3 tokens, 1 with a loss."""
    query_and_output, key_and_value, mlp = 2 * 8 * 8, 2 * 8 * 4, 3 * 8 * 10
    matmuls = 3 * (query_and_output + key_and_value + mlp)
    pairs = 1 + 2 + 3
    attention = 2 * pairs * 4 * 2  # scores and weighted values, 4 heads of width 2
    head = 8 * 100
    # 2 FLOPs per multiply-add, backward costs twice the forward pass.
    assert dense(num_layers=1).flops([3], [1]).tolist() == [6 * (matmuls + attention + head)]


def test_keys_and_values_of_different_widths_cost_their_sum():
    """Multi-head latent attention: scores of width 3, values of width 5; 2 tokens have 3 pairs."""
    shape = ModelShape(1, 1, (AttentionShape(num_layers=2, num_heads=4, num_kv_heads=4, key_dim=3, value_dim=5),))
    assert shape.flops([2], [0]).tolist() == [6 * (2 + 2 * 4 * (3 + 5) * 3)]


def test_cost_is_linear_plus_quadratic_in_the_length():
    """Third differences of a polynomial of degree two vanish, second differences are constant and positive."""
    cost = dense().flops(np.arange(1, 9), np.zeros(8))
    second = np.diff(cost, n=2)
    assert (second == second[0]).all()
    assert second[0] > 0


def test_without_softmax_attention_cost_is_linear():
    cost = ModelShape(100, 10).flops(np.arange(1, 9), np.zeros(8))
    assert (np.diff(cost) == 600).all()


def test_windowed_layers_are_linear_past_the_window():
    lengths = np.arange(1, 12)
    cost = dense(windows=(4, 4, 4)).flops(lengths, np.zeros(11))
    assert (np.diff(cost, n=2)[3:] == 0).all()
    assert (cost[:4] == dense().flops(lengths, np.zeros(11))[:4]).all(), "a window longer than the text"


def test_layers_with_and_without_window_add_up():
    lengths, none = [5, 50], [0, 0]
    full, all_windowed, mixed = (dense(windows=windows).flops(lengths, none) for windows in ((), (4, 4, 4), (4,)))
    np.testing.assert_allclose(mixed, (2 * full + all_windowed) / 3, rtol=1e-15)


def test_the_head_is_paid_for_loss_tokens_only():
    with_loss, without = dense().flops([9, 9], [5, 0])
    assert with_loss - without == 6 * 5 * 8 * 100


def test_sharing_key_value_heads_makes_tokens_cheaper():
    assert dense(num_kv_heads=1).flops([9], [0]) < dense().flops([9], [0])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ModelShape(0, 800),
        lambda: ModelShape(100, 0),
        lambda: AttentionShape(0, 4, 2, 8, 8),
        lambda: AttentionShape(1, 4, 2, 8, 0),
        lambda: AttentionShape(1, 4, 2, 8, 8, window=0),
    ],
)
def test_an_impossible_shape_is_refused(wrong):
    with pytest.raises(AssertionError):
        wrong()
