"""From loss tokens to the sequences they belong to, and back; for losses that look at a response as a whole.

Sums run over the tokens at hand, counts are those of the whole sample, so nothing here sees how a step was cut.
Leaves out sums over ranks: every token of a sequence must be at hand.
"""

from __future__ import annotations

from torch import Tensor


def sum_by_sequence(x: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Sum of each sequence's tokens.

    Args:
        x: [N] float, carries the gradient.
        sequence: [N] int64, sequence of each token, 0 to B-1.
        num_sequences: B.

    Returns:
        [B], dtype of ``x``; 0 for a sequence without tokens.
    """
    assert x.shape == sequence.shape, "one sequence per token"
    return x.new_zeros(num_sequences).index_add(0, sequence, x)


def mean_by_sequence(x: Tensor, sequence: Tensor, loss_tokens: Tensor) -> Tensor:
    """Mean over each sequence's loss tokens, given back to each of them.

    Args:
        x: [N] float, carries the gradient.
        sequence: [N] int64, sequence of each token, 0 to B-1.
        loss_tokens: [B] int64, loss tokens of each whole sequence.

    Returns:
        [N], dtype of ``x``: equal for all tokens of a sequence, which share its gradient.
    """
    total = sum_by_sequence(x, sequence, len(loss_tokens))  # [B]
    return (total / loss_tokens.clamp(min=1))[sequence]
