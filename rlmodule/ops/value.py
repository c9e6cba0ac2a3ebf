"""Value functions: generalised advantage estimation, the clipped value loss, explained variance."""

from __future__ import annotations

import torch
from torch import Tensor

from rlmodule.core.types import TokenLoss

# Spread of returns, over the largest number they were made of, that is taken for rounding: a return is the sum of a
# value and of an advantage that goes back over thousands of tokens.
ROUNDING = 1e-9


def lambda_advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, loss_tokens: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimation (arXiv:1506.02438) over the loss tokens of each response.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next LOSS token: tool
    and observation tokens in between neither discount nor reset.

    Args:
        reward, value: [N] float64, the loss tokens of all responses, concatenated.
        next_value: [B] float64, value after the last loss token of each response; 0 where the episode ended.
        loss_tokens: [B] int64, loss tokens of each response, possibly 0.
        gamma: discount per loss token.
        lam: decay of multi-step estimates; 0 gives one-step TD errors, 1 Monte-Carlo returns minus values.

    Returns:
        [N] float64.
    """
    last = (loss_tokens.cumsum(0) - 1)[loss_tokens > 0]  # last loss token of each response that has any
    following = torch.cat([value[1:], value.new_zeros(min(1, len(value)))])
    following[last] = next_value[loss_tokens > 0]
    advantage = reward + gamma * following - value
    counts = loss_tokens[loss_tokens > 0]
    for back in range(1, int(counts.max()) if len(counts) else 0):
        token = last[counts > back] - back
        advantage[token] += gamma * lam * advantage[token + 1]
    return advantage


def value_loss(value: Tensor, returns: Tensor, old_value: Tensor, clip_range: float | None = None) -> TokenLoss:
    """Half the squared error of each value; with a clip range, the larger of it and that of the clipped value.

    Args:
        value: [N] float32 of the value function being trained, with gradient.
        returns: [N] float32 targets.
        old_value: [N] float32 of the value function that started the update.
        clip_range: largest change from the old value that still has a gradient; None for no clipping.

    Returns:
        [N] losses; the metric ``vf_clip_frac`` is 1 where the clipped value gives the loss.
    """
    loss = (value - returns).square()
    clipped = torch.zeros_like(loss)
    if clip_range is not None:
        change = value - old_value
        clipped_loss = (old_value + change.clamp(-clip_range, clip_range) - returns).square()
        # Within the range the two losses differ by rounding only, which must not count as clipped.
        is_clipped = (change.abs() > clip_range) & (clipped_loss > loss)
        clipped = is_clipped.float()
        loss = torch.where(is_clipped, clipped_loss, loss)
    return TokenLoss(loss / 2, {"vf_clip_frac": clipped.detach()})


def explained_variance(value: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - value) / Var(returns) over [N] tokens: 1 is perfect, 0 no better than a constant.

    NaN if all returns are equal, but for rounding.
    """
    if len(returns) < 2:
        return float("nan")
    largest = torch.maximum(value.abs().max(), returns.abs().max())
    if bool(returns.max() - returns.min() <= ROUNDING * largest):
        return float("nan")
    return 1.0 - float((returns - value).double().var() / returns.double().var())
