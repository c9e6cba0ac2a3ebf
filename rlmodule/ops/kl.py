"""What log-ratios between two policies turn into: importance ratios and per-token estimates of KL(policy || reference).

All estimates take tokens drawn from the policy. With d = logprob - ref_logprob, in nats:

    kind   value           estimate of the KL       gradient, as a loss, expected over the policy's own tokens
    k1     d               unbiased, can be < 0     0: no pull at all, so only for a penalty inside the reward
    abs    |d|             biased                   of no divergence; a distance to watch
    k2     d^2 / 2         biased, good when near   of KL(policy || reference): the right one
    k3     exp(-d)-1+d     unbiased, never < 0      of KL(reference || policy): another way to the same optimum
    X+     that of X       as X                     that of k2

The gradients hold on-policy. For tokens of an older policy multiply the estimate by ``importance_ratio`` first.
Leaves out coefficients and sums.
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
    """``exp``, kept finite from above; the slope past the bound is that at the bound, not 0.

    A clamp would stop the gradient of just those tokens that have drifted furthest.

    Args:
        log_ratio: any shape, float32 or float64.

    Returns:
        Shape and dtype of ``log_ratio``, at most ``exp(MAX_LOG_RATIO)``.
    """
    return _bounded(log_ratio).exp()


def _bounded(log_ratio: Tensor) -> Tensor:
    """At most ``MAX_LOG_RATIO``, with slope 1 everywhere."""
    return log_ratio - (log_ratio - MAX_LOG_RATIO).clamp(min=0).detach()


def importance_ratio(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    """How much likelier each token is now than when it was drawn; [N], carries the gradient of both."""
    return bounded_exp(logprob - old_logprob)


def binary_kl(logprob: Tensor, other_logprob: Tensor) -> Tensor:
    """KL(first || second) of the distributions over "the taken token, or any other"; a floor of the whole divergence.

    Args:
        logprob, other_logprob: [N], at most 0; no gradient is wanted of it.

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
        kind: one of ``KINDS``; the table on top says which value and which gradient each has.

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
