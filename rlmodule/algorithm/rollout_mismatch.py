"""How far rollout engine and trainer are apart: the numbers ``rollout_corr/*`` of an iteration.

Each is made of sums, minima and maxima over tokens or responses, so that ranks merge them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmodule.core.metrics import Metric, Metrics, maximum_of, mean_of, merge, minimum_of, ratio
from rlmodule.ops.kl import bounded_exp


@dataclass(frozen=True, eq=False)
class ComparedResponse:
    """The loss tokens of one response, as sampled; tensors of a response without any are empty.

    Args:
        old_logprob: [N] under the policy that starts the update, computed by the trainer.
        rollout_logprob: [N] with which the rollout engine sampled the tokens.
        weight: [N] factor of their loss, 1 without correction.
        unbounded: [N] the weight before it was bounded, None where weights are not ratios.
        kept: [N] bool, False for rejected tokens.
    """

    old_logprob: Tensor
    rollout_logprob: Tensor
    weight: Tensor
    unbounded: Tensor | None
    kept: Tensor


def mismatch_parts(responses: Iterable[ComparedResponse]) -> dict[str, Metric]:
    """This rank's parts of the numbers, to be merged over ranks; the names are the same on all of them."""
    return merge([_no_tokens(), *(_of_response(one) for one in responses if len(one.old_logprob))])


def _no_tokens() -> dict[str, Metric]:
    empty = torch.zeros(0, dtype=torch.float64)
    return _of_tokens(ComparedResponse(empty, empty, empty, None, empty.bool())) | {
        name: ratio(0.0, 0.0)
        for name in ("chi2_seq", "ppl_trainer", "ppl_rollout", "log_ppl_diff", "log_ppl_gap", "rejected_responses")
    }


def _of_response(one: ComparedResponse) -> dict[str, Metric]:
    old, rollout = one.old_logprob.double(), one.rollout_logprob.double()
    gap = rollout.mean() - old.mean()  # log-perplexity of the trainer minus that of the rollout engine
    return _of_tokens(one) | {
        "chi2_seq": ratio(bounded_exp((old - rollout).sum()).square(), 1.0),
        "ppl_trainer": ratio(bounded_exp(-old.mean()), 1.0),
        "ppl_rollout": ratio(bounded_exp(-rollout.mean()), 1.0),
        "log_ppl_diff": ratio(gap, 1.0),
        "log_ppl_gap": ratio(gap.abs(), 1.0),
        "rejected_responses": ratio(float(not one.kept.any()), 1.0),
    }


def _of_tokens(one: ComparedResponse) -> dict[str, Metric]:
    log_ratio, weight = one.old_logprob.double() - one.rollout_logprob.double(), one.weight.double()
    token_ratio = bounded_exp(log_ratio)
    is_changed = torch.zeros_like(weight) if one.unbounded is None else (weight != one.unbounded).double()
    return {
        "kl": mean_of(-log_ratio),
        "k3_kl": mean_of(torch.expm1(log_ratio.clamp(max=20)) - log_ratio),
        "chi2_token": mean_of(token_ratio.square()),
        "clip_frac": mean_of(is_changed),
        "rejected_tokens": mean_of((~one.kept).double()),
        **_moments("ratio", token_ratio),
        **_moments("weight", weight),
    }


def _moments(name: str, value: Tensor) -> dict[str, Metric]:
    return {
        f"{name}_mean": mean_of(value),
        f"{name}_std": mean_of(value.square()),
        f"{name}_min": minimum_of(value),
        f"{name}_max": maximum_of(value),
    }


def mismatch_metrics(parts: Metrics) -> dict[str, float]:
    """Metrics ``rollout_corr/*`` from the merged parts of all ranks; none where there was no token.

    With r the ratio of a token's probability under the trainer to that under the rollout engine:

    - ``kl``, ``k3_kl`` estimate KL(rollout || trainer) per token in nats.
    - ``chi2_token`` is the mean of r^2, minus 1; ``chi2_seq`` that of the product of r over a response.
    - ``ratio_{mean,std,min,max}`` are of r, ``weight_{mean,std,min,max}`` of the factors of the loss.
    - ``ess`` is the effective sample size of the factors over the number of tokens, mean^2 / mean of squares.
    - ``clip_frac`` is the share of tokens whose weight differs from the ratio.
    - ``ppl_trainer``, ``ppl_rollout`` are mean perplexities of a response; ``log_ppl_diff`` is the mean of the
      log-perplexity of the trainer minus that of the engine, ``log_ppl_gap`` the mean of its absolute value.
    - ``rejected_tokens``, ``rejected_responses`` are the shares of tokens, and of responses with all their tokens.
    """
    if not parts["kl"].saw_data:
        return {}
    numbers = {name: part.result for name, part in parts.items()}
    squares = {name: numbers[f"{name}_std"] for name in ("ratio", "weight")}
    for name, square in squares.items():
        numbers[f"{name}_std"] = math.sqrt(max(square - numbers[f"{name}_mean"] ** 2, 0.0))
    numbers["ess"] = numbers["weight_mean"] ** 2 / squares["weight"] if squares["weight"] else 0.0
    numbers["chi2_token"] -= 1
    numbers["chi2_seq"] -= 1
    return {f"rollout_corr/{name}": value for name, value in numbers.items()}
