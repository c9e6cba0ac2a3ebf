"""Aggregation of token losses: the share of one micro-batch in the loss of a whole optimizer step.

Every mode is a weight per loss token that depends on counts of the whole mini-batch, which are known before the first
forward pass. A share is ``sum(loss * weight)``; shares add up to the same loss however the mini-batch is split into
micro-batches. Nothing is divided by a count of the micro-batch, by the width of a tensor or by the number of
micro-batches.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlmodule.core.errors import did_you_mean
from rlmodule.core.types import StepTotals

TOKEN_MEAN: Final = "token-mean"
TOKEN_SUM: Final = "token-sum"
SEQ_MEAN_TOKEN_SUM: Final = "seq-mean-token-sum"
SEQ_MEAN_TOKEN_MEAN: Final = "seq-mean-token-mean"
SEQ_MEAN_TOKEN_SUM_NORM: Final = "seq-mean-token-sum-norm"
PROMPT_MEAN: Final = "prompt-mean"

MODES: Final = (
    TOKEN_MEAN,
    TOKEN_SUM,
    SEQ_MEAN_TOKEN_SUM,
    SEQ_MEAN_TOKEN_MEAN,
    SEQ_MEAN_TOKEN_SUM_NORM,
    PROMPT_MEAN,
)


def token_weights(
    mode: str,
    *,
    sequence: Tensor,
    loss_tokens: Tensor,
    group_tokens: Tensor,
    totals: StepTotals,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Weight of each loss token of a micro-batch in the loss of the whole step.

    Args:
        mode: one of ``MODES``.
        sequence: [N] int64, sample of each loss token, 0 to B-1.
        loss_tokens: [B] int64, loss tokens of each whole sample, even if this rank has only a slice of it.
        group_tokens: [B] int64, loss tokens of the sample's whole group in the mini-batch.
        totals: counts of the whole mini-batch over all data ranks.
        loss_scale_factor: the constant divisor of ``seq-mean-token-sum-norm``, e.g. the maximal response length.

    Returns:
        [N] float32; for the modes that are means, the weights of all micro-batches and data ranks add up to 1.

    Raises:
        ValueError: unknown mode, or ``seq-mean-token-sum-norm`` without a positive constant.
    """
    assert loss_tokens.shape == group_tokens.shape, "one count of the sample and one of its group per sample"
    assert len(sequence) <= totals.tokens, (
        f"a micro-batch of {len(sequence)} loss tokens in a mini-batch of {totals.tokens}: totals are not of this step"
    )
    # In float64 until the end, so that each weight is rounded only once.
    per_sample = torch.ones_like(loss_tokens, dtype=torch.float64)  # [B]
    tokens_of_sample, tokens_of_group = (
        loss_tokens.clamp(min=1),
        group_tokens.clamp(min=1),
    )  # a sample of 0 loss tokens has no weight
    if mode == TOKEN_MEAN:
        per_sample = per_sample / max(totals.tokens, 1)
    elif mode == TOKEN_SUM:
        pass
    elif mode == SEQ_MEAN_TOKEN_SUM:
        per_sample = per_sample / max(totals.sequences, 1)
    elif mode == SEQ_MEAN_TOKEN_MEAN:
        per_sample = per_sample / max(totals.sequences, 1) / tokens_of_sample
    elif mode == SEQ_MEAN_TOKEN_SUM_NORM:
        if loss_scale_factor is None or not loss_scale_factor > 0:
            raise ValueError(f"{mode} divides by a constant: loss_scale_factor={loss_scale_factor} is not positive")
        per_sample = per_sample / max(totals.sequences, 1) / loss_scale_factor
    elif mode == PROMPT_MEAN:
        assert totals.groups > 0 or len(sequence) == 0, f"{mode} needs the loss tokens of each group in StepTotals"
        per_sample = per_sample / max(totals.groups, 1) / tokens_of_group
    else:
        raise ValueError(f"no aggregation mode is called {mode}. {did_you_mean(mode, MODES)}")
    return per_sample.float()[sequence]


def share_of(loss: Tensor, weight: Tensor) -> Tensor:
    """The micro-batch's share of the step's loss; shares of all micro-batches and data ranks add up to the loss.

    Args:
        loss: [N] per loss token.
        weight: [N] from ``token_weights``.

    Returns:
        Scalar in the dtype of ``loss``; when N is 0, a zero that is attached to the autograd graph.
    """
    assert loss.shape == weight.shape, f"one weight per loss token, got {tuple(loss.shape)} and {tuple(weight.shape)}"
    return (loss * weight).sum()


def aggregate(loss: Tensor, weight: Tensor, totals: StepTotals) -> Tensor:
    """The scalar to call ``backward`` on: the share times the number of ranks over which gradients are averaged.

    Args:
        loss: [N] per loss token.
        weight: [N] from ``token_weights``.
        totals: counts of the whole mini-batch over all data ranks.

    Returns:
        Scalar in the dtype of ``loss``; when N is 0, a zero that is attached to the autograd graph.
    """
    # DDP, FSDP and ZeRO average gradients over data and sequence ranks; the factor turns the average into the sum.
    return share_of(loss, weight) * totals.gradient_ranks
