"""Importance ratios, and per-token estimates of KL(policy || reference) from log-probabilities.

The estimates are for tokens sampled from the policy. With d = logprob - ref_logprob, in nats:

    kind   value           estimate of the KL        expected gradient when used as a loss
    k1     d               unbiased, can be < 0      0, so k1 is for a penalty inside the reward only
    abs    |d|             biased                    of no divergence; for monitoring
    k2     d^2 / 2         biased, close for small d of KL(policy || reference)
    k3     exp(-d)-1+d     unbiased, never < 0       of KL(reference || policy), which has the same minimum
    X+     as X            as X                      as k2 (straight-through)

The gradients hold for tokens of the current policy. For tokens of an older policy, multiply the estimate by
``importance_ratio`` first. Estimates: http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# exp() overflows float32 near 88; 20 leaves room for a product of ratios.
MAX_LOG_RATIO = 20.0

STRAIGHT_THROUGH: Final = "+"
ESTIMATORS: Final = ("k1", "abs", "k2", "k3")
KINDS: Final = (*ESTIMATORS, *(kind + STRAIGHT_THROUGH for kind in ESTIMATORS if kind != "k2"))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` with an upper bound on the value; above the bound the slope is that at the bound, not 0.

    A clamp would stop the gradient of exactly those tokens that have drifted furthest.

    Args:
        log_ratio: any shape, float32 or float64.

    Returns:
        Shape and dtype of ``log_ratio``, at most ``exp(MAX_LOG_RATIO)``.
    """
    return _bounded(log_ratio).exp()


def _bounded(log_ratio: Tensor) -> Tensor:
    """Clamp to at most ``MAX_LOG_RATIO``, with slope 1 everywhere."""
    return log_ratio - (log_ratio - MAX_LOG_RATIO).clamp(min=0).detach()


def importance_ratio(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    """[N] probability of each token under the policy over that under the old policy; differentiable in both."""
    return bounded_exp(logprob - old_logprob)


def binary_kl(logprob: Tensor, other_logprob: Tensor) -> Tensor:
    """KL(first || second) of the binary distributions "the taken token, or any other"; a lower bound of the full KL.

    Args:
        logprob, other_logprob: [N], at most 0; the result is not meant to be differentiated.

    Returns:
        [N], dtype of ``logprob``, at least 0 and finite.
    """
    p = logprob.exp()
    tiny = torch.finfo(logprob.dtype).tiny
    rest = (-torch.expm1(logprob)).clamp(min=0)  # 1 - p without losing the digits of a p near 1
    other_rest = (-torch.expm1(other_logprob)).clamp(min=tiny)
    of_others = torch.where(rest > 0, rest * (rest.clamp(min=tiny).log() - other_rest.log()), 0.0)
    return (p * (logprob - other_logprob) + of_others).clamp(min=0)


def kl_per_token(logprob: Tensor, ref_logprob: Tensor, kind: str = "k3") -> Tensor:
    """Estimate of KL(policy || reference) from each taken token.

    Args:
        logprob: [N] under the policy the tokens were drawn from.
        ref_logprob: [N] under the reference.
        kind: one of ``KINDS``; the table at the top of this module gives value and gradient of each.

    Returns:
        [N], dtype of ``logprob``.

    Raises:
        ValueError: unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"no KL estimate is called {kind}; known: {', '.join(KINDS)}")
    difference = logprob - ref_logprob
    estimate = _estimate(difference, kind.removesuffix(STRAIGHT_THROUGH))
    if not kind.endswith(STRAIGHT_THROUGH):
        return estimate
    slope = _estimate(difference, "k2")
    return slope + (estimate - slope).detach()


def _estimate(difference: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    # expm1 keeps the digits of exp(-d) - 1 + d near d = 0, where it is d^2 / 2.
    return torch.expm1(_bounded(-difference)) + difference
