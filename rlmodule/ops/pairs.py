"""Pairs of sequences: how much more likely the chosen and the rejected one became than under the reference.

A pair is a group of one sequence with a positive advantage, the chosen one, and one with a negative advantage, the
rejected one. It must be whole in its micro-batch; its sequences may be cut over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlmodule.core.types import LossInputs, TokenLoss


def log_ratios_of_pairs(x: LossInputs, *, per_token: bool = False) -> Tensor:
    """[N] loss tokens -> [B, 2] sum of logprob - ref_logprob over the chosen and the rejected sequence of each group.

    Args:
        x: needs ``ref_logprob``, ``advantage``, of which the sign counts, and ``group``.
        per_token: means over the tokens of a sequence instead of sums.

    Returns:
        Nats; the first G rows are the groups, by number, the others are 0.
    """
    assert x.ref_logprob is not None, "pairs are compared with ref_logprob"
    return sums_of_pairs(x, x.logprob - x.ref_logprob, per_token=per_token)


def sums_of_pairs(x: LossInputs, value: Tensor, *, per_token: bool = False) -> Tensor:
    """[N] of each loss token -> [B, 2] sums over the chosen and the rejected sequence of each group.

    Args:
        x: needs ``advantage``, of which the sign counts, and ``group``.
        value: what is added up.
        per_token: means over the tokens of a sequence instead of sums.

    Returns:
        The first G rows are the groups, by number, the others are 0.
    """
    assert x.advantage is not None, "the advantage says which sequence was chosen"
    assert x.group is not None, "pairs are groups"
    # Chosen and rejected in columns of their own: one sum over slices serves both.
    sides = torch.stack([x.advantage > 0, x.advantage < 0], dim=1)  # [N, 2]
    of_sequence = x.sum_per_sequence(torch.where(sides, value[:, None], 0.0))  # [B, 2]
    if per_token:
        of_sequence = of_sequence / x.loss_tokens.clamp(min=1)[:, None]
    return torch.zeros_like(of_sequence).index_add(0, x.group, of_sequence)


def loss_of_pairs(x: LossInputs, loss: Tensor, reward: Tensor, **more: Tensor) -> TokenLoss:
    """The loss of each pair, given to all its tokens, and what is logged of it.

    Args:
        x: the micro-batch.
        loss: [B] of each group.
        reward: [B, 2] of the chosen and the rejected sequence of each group.
        more: further [B, 2] facts of the two, by name.

    Returns:
        Under ``prompt-mean`` the loss of a step is the mean over its pairs, and so is every metric: ``chosen_reward``,
        ``rejected_reward``, the ``margin`` between them, ``pair_accuracy``, the share of pairs with a positive margin,
        and ``chosen_NAME``, ``rejected_NAME`` of what else is given.
    """
    assert x.group is not None, "pairs are groups"
    pair = x.group[x.sequence]  # [N]
    chosen, rejected = reward.detach().unbind(1)
    described = {"margin": chosen - rejected, "pair_accuracy": (chosen > rejected).to(loss.dtype)}
    for name, both in {"reward": reward, **more}.items():
        described[f"chosen_{name}"], described[f"rejected_{name}"] = both.detach().unbind(1)
    return TokenLoss(loss=loss[pair], shares={name: value[pair] for name, value in described.items()})


def nll_of_chosen(x: LossInputs) -> Tensor:
    """[N] loss tokens -> [N] negative log-likelihood of the chosen sequence, nats; 0 on tokens of the rejected one.

    Scaled so that ``prompt-mean`` makes of it the mean over pairs of means over the chosen sequence's tokens.
    """
    assert x.advantage is not None, "the advantage says which sequence was chosen"
    assert x.group is not None, "pairs are groups"
    of_pair = torch.zeros_like(x.loss_tokens).index_add(0, x.group, x.loss_tokens)  # [B] loss tokens of each group
    # prompt-mean divides by the tokens of the pair; a mean over the chosen sequence divides by its own.
    scale = of_pair[x.group] / x.loss_tokens.clamp(min=1)  # [B]
    return torch.where(x.advantage > 0, -x.logprob * scale[x.sequence], 0.0)
