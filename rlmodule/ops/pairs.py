"""Preference pairs: sums over the chosen and the rejected sequence, and losses of pairs.

A pair is a group of two sequences: the chosen one has a positive advantage, the rejected one a negative advantage. Both
are in the same micro-batch; their tokens may be sharded over sequence-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlmodule.core.types import LossInputs, TokenLoss


def log_ratios_of_pairs(x: LossInputs, *, per_token: bool = False) -> Tensor:
    """Sum of logprob - ref_logprob over the chosen and the rejected sequence of each pair.

    Args:
        x: needs ``ref_logprob``, ``advantage`` (its sign) and ``group``.
        per_token: mean over the tokens of a sequence instead of the sum.

    Returns:
        [B, 2] nats, columns chosen and rejected; row g is group g, rows from G on are 0.
    """
    assert x.ref_logprob is not None, "log-ratios of pairs need ref_logprob"
    return sums_of_pairs(x, x.logprob - x.ref_logprob, per_token=per_token)


def sums_of_pairs(x: LossInputs, value: Tensor, *, per_token: bool = False) -> Tensor:
    """Sum of a value over the chosen and the rejected sequence of each pair.

    Args:
        x: needs ``advantage`` (its sign) and ``group``.
        value: [N] value of each loss token.
        per_token: mean over the tokens of a sequence instead of the sum.

    Returns:
        [B, 2], columns chosen and rejected; row g is group g, rows from G on are 0.
    """
    assert x.advantage is not None, "pairs need the advantage: its sign tells which sequence was chosen"
    assert x.group is not None, "pairs need the groups of the samples"
    # Chosen and rejected in two columns, so that one sum over sequence ranks serves both.
    sides = torch.stack([x.advantage > 0, x.advantage < 0], dim=1)  # [N, 2]
    sums = x.sum_per_sequence(torch.where(sides, value[:, None], 0.0))  # [B, 2]
    if per_token:
        sums = sums / x.loss_tokens.clamp(min=1)[:, None]
    return torch.zeros_like(sums).index_add(0, x.group, sums)


def loss_of_pairs(x: LossInputs, loss: Tensor, reward: Tensor, **more: Tensor) -> TokenLoss:
    """Give the loss and the metrics of each pair to all its tokens.

    With ``loss_agg_mode=prompt-mean`` the loss of a step is then the mean over its pairs, and so is every metric.

    Args:
        x: the micro-batch.
        loss: [B] loss of each group.
        reward: [B, 2] reward of the chosen and the rejected sequence of each group.
        more: further [B, 2] values of the two, by name.

    Returns:
        [N] losses, and the metrics ``chosen_reward``, ``rejected_reward``, ``margin`` (their difference),
        ``pair_accuracy`` (share of pairs with a positive margin), ``chosen_NAME`` and ``rejected_NAME``.
    """
    assert x.group is not None, "pairs need the groups of the samples"
    pair = x.group[x.sequence]  # [N]
    chosen, rejected = reward.detach().unbind(1)
    metrics = {"margin": chosen - rejected, "pair_accuracy": (chosen > rejected).to(loss.dtype)}
    for name, both in {"reward": reward, **more}.items():
        metrics[f"chosen_{name}"], metrics[f"rejected_{name}"] = both.detach().unbind(1)
    return TokenLoss(loss=loss[pair], shares={name: value[pair] for name, value in metrics.items()})


def nll_of_chosen(x: LossInputs) -> Tensor:
    """[N] negative log-likelihood of the chosen sequence in nats, 0 on tokens of the rejected one.

    It is scaled so that ``prompt-mean`` gives the mean over pairs of the mean over the chosen sequence's tokens.
    """
    assert x.advantage is not None, "pairs need the advantage: its sign tells which sequence was chosen"
    assert x.group is not None, "pairs need the groups of the samples"
    pair_tokens = torch.zeros_like(x.loss_tokens).index_add(0, x.group, x.loss_tokens)  # [B] loss tokens of each group
    # prompt-mean divides by the tokens of the pair; a mean over the chosen sequence divides by its own.
    scale = pair_tokens[x.group] / x.loss_tokens.clamp(min=1)  # [B]
    return torch.where(x.advantage > 0, -x.logprob * scale[x.sequence], 0.0)
