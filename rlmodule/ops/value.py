"""Value learning: advantages and returns from values, the loss of a value function, and how much it explains.

Leaves out where values come from (``models/value.py``) and sums over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlmodule.core.types import TokenLoss


def lambda_advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, loss_tokens: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimation (arXiv:1506.02438) over the loss tokens of each response.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next LOSS token: what
    stands between two of them (tools, observations) neither discounts nor resets.

    Args:
        reward, value: [N] float64, responses end to end.
        next_value: [B] float64, the value after the last loss token of each response; 0 where the episode ended.
        loss_tokens: [B] int64, how many of the N belong to each response; some may have none.
        gamma: discount per loss token.
        lam: weight of longer looks ahead; 0 trusts the values, 1 the rewards.

    Returns:
        [N] float64.
    """
    last = (loss_tokens.cumsum(0) - 1)[loss_tokens > 0]  # place of the last token of each response that has any
    following = torch.cat([value[1:], value.new_zeros(min(1, len(value)))])
    following[last] = next_value[loss_tokens > 0]
    advantage = reward + gamma * following - value
    counts = loss_tokens[loss_tokens > 0]
    for back in range(1, int(counts.max()) if len(counts) else 0):
        place = last[counts > back] - back
        advantage[place] += gamma * lam * advantage[place + 1]
    return advantage


def value_loss(value: Tensor, returns: Tensor, old_value: Tensor, clip_range: float | None = None) -> TokenLoss:
    """Half the squared error of each value; with a range, the worse of it and that of the bounded value.

    Args:
        value: [N] float32 under the value function being trained, carries the gradient.
        returns: [N] float32, what it is to say.
        old_value: [N] float32 under the value function that started the update.
        clip_range: how far a value may move from the old one and still have a gradient; None for as far as it likes.

    Returns:
        [N] losses; ``vf_clip_frac`` is 1 where the bounded value decides.
    """
    loss = (value - returns).square()
    clipped = torch.zeros_like(loss)
    if clip_range is not None:
        moved = value - old_value
        bounded_loss = (old_value + moved.clamp(-clip_range, clip_range) - returns).square()
        # Inside the range the two differ by rounding alone, which must not decide.
        decides = (moved.abs() > clip_range) & (bounded_loss > loss)
        clipped = decides.float()
        loss = torch.where(decides, bounded_loss, loss)
    return TokenLoss(loss / 2, {"vf_clip_frac": clipped.detach()})


def explained_variance(value: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - value) / Var(returns) over [N] tokens: 1 is perfect, 0 no better than a constant.

    NaN for returns that are all alike, where there is nothing to explain.
    """
    if len(returns) < 2 or bool((returns == returns[0]).all()):
        return float("nan")
    return 1.0 - float((returns - value).double().var() / returns.double().var())
