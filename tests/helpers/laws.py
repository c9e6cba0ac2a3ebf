"""Laws every policy loss and every advantage estimator keeps; run over the whole menu, so a new file gets them free.

A ``Rollouts`` is one mini-batch of made-up loss tokens that can be cut into micro-batches by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlmodule.core.contract import Advantage, Loss
from rlmodule.core.types import AdvantageInputs, LossInputs, StepTotals, TokenValues
from rlmodule.ops.aggregate import MODES, aggregate, token_weights
from rlmodule.ops.masked import select

LENGTHS = (3, 1, 4, 2, 5, 1)
GROUPS = (7, 7, 2, 2, 2, 9)
CUTS = (
    [[0, 1, 2, 3, 4, 5]],
    [[0], [1], [2], [3], [4], [5]],
    [[5, 0], [], [4, 3, 1], [2]],
    [[4], [0, 1, 2, 3, 5]],
)
# For losses that read ``group``, which is whole in its micro-batch.
CUTS_BETWEEN_GROUPS = ([[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3, 4], [5]], [[5, 1, 0], [], [4, 3, 2]])


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the loss tokens of some sequences sit: ``sequence`` [N], ``loss_tokens`` and ``group_tokens`` [B]."""

    sequence: Tensor
    loss_tokens: Tensor
    group_tokens: Tensor


def lay_out(lengths: Sequence[int], groups: Sequence[int], totals: StepTotals) -> Layout:
    """Sequences of ``lengths`` loss tokens, end to end; ``groups`` are keys of ``totals.group_tokens``."""
    loss_tokens = torch.tensor(lengths, dtype=torch.int64)
    return Layout(
        sequence=torch.arange(len(lengths)).repeat_interleave(loss_tokens),
        loss_tokens=loss_tokens,
        group_tokens=torch.tensor([totals.group_tokens.get(g, 0) for g in groups], dtype=torch.int64),
    )


def totals_of(
    lengths: Sequence[int], groups: Sequence[int] | None = None, dp_size: int = 1, sp_size: int = 1
) -> StepTotals:
    """Counts of a mini-batch made of these sequences; by default each is its own group."""
    groups = range(len(lengths)) if groups is None else groups
    group_tokens: dict[int, int] = {}
    for group, length in zip(groups, lengths, strict=True):
        if length:
            group_tokens[group] = group_tokens.get(group, 0) + length
    return StepTotals(
        tokens=sum(lengths),
        sequences=sum(length > 0 for length in lengths),
        dp_size=dp_size,
        sp_size=sp_size,
        group_tokens=group_tokens,
    )


@dataclass(frozen=True, eq=False)
class Rollouts:
    """One mini-batch of loss tokens, float64, sequences end to end."""

    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    logprob: Tensor
    old_logprob: Tensor
    ref_logprob: Tensor
    teacher_logprob: Tensor
    advantage: Tensor
    selected: Tensor

    @property
    def totals(self) -> StepTotals:
        return totals_of(self.lengths, self.groups)

    def tokens_of(self, rows: Sequence[int]) -> Tensor:
        """Places of the loss tokens of these sequences, in the order of ``rows``."""
        ends = torch.tensor(self.lengths).cumsum(0)
        return torch.cat(
            [torch.empty(0, dtype=torch.int64), *(torch.arange(ends[r] - self.lengths[r], ends[r]) for r in rows)]
        )

    def inputs(self, rows: Sequence[int], logprob: Tensor | None = None) -> LossInputs:
        """What a loss sees of these sequences; ``logprob`` replaces that of the whole mini-batch, for gradients."""
        at = self.tokens_of(rows)
        where = lay_out([self.lengths[r] for r in rows], [self.groups[r] for r in rows], self.totals)
        groups = [self.groups[r] for r in rows]
        number = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        return LossInputs(
            logprob=(self.logprob if logprob is None else logprob)[at],
            sequence=where.sequence,
            loss_tokens=where.loss_tokens,
            old_logprob=self.old_logprob[at],
            advantage=self.advantage[at],
            ref_logprob=self.ref_logprob[at],
            teacher_logprob=self.teacher_logprob[at],
            teacher_top_logprob=top_tokens(self.teacher_logprob[at]),
            top_logprob=top_tokens((self.logprob if logprob is None else logprob)[at]),
            selected=self.selected[at],
            group=torch.tensor([number[group] for group in groups], dtype=torch.int64),
        )

    def weights(self, rows: Sequence[int], mode: str) -> Tensor:
        """[N] aggregation weights of the loss tokens of these sequences."""
        where = lay_out([self.lengths[r] for r in rows], [self.groups[r] for r in rows], self.totals)
        return token_weights(
            mode,
            sequence=where.sequence,
            loss_tokens=where.loss_tokens,
            group_tokens=where.group_tokens,
            totals=self.totals,
            loss_scale_factor=8.0,
        )


def top_tokens(logprob: Tensor) -> Tensor:
    """[N] log-probabilities -> [N, 3] of three different tokens, with a sum of probabilities below 1."""
    return torch.stack([torch.nn.functional.logsigmoid(logprob) - step for step in (0.8, 1.6, 2.4)], -1)


def rollouts(seed: int = 0, drift: float = 0.5) -> Rollouts:
    """A mini-batch whose log-ratios have a spread of ``drift`` nats; one advantage per sequence."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(sum(LENGTHS), generator=rng, dtype=torch.float64) * 3 - 0.1
    drawn = torch.randn(2, sum(LENGTHS), generator=rng, dtype=torch.float64) * drift
    advantage = torch.randn(len(LENGTHS), generator=rng, dtype=torch.float64)
    return Rollouts(
        lengths=LENGTHS,
        groups=GROUPS,
        logprob=old + drawn[0],
        old_logprob=old,
        ref_logprob=old + drawn[1],
        teacher_logprob=old + drawn[1].flip(0),
        advantage=advantage.repeat_interleave(torch.tensor(LENGTHS)),
        selected=torch.rand(sum(LENGTHS), generator=rng) < 0.3,
    )


def _optimised(
    loss: Loss, data: Rollouts, cut: Sequence[Sequence[int]], mode: str
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss of the step, its gradient [N] and what adds up of each metric, with the mini-batch cut like this."""
    logprob = data.logprob.clone().requires_grad_()
    value = torch.zeros((), dtype=torch.float64)
    metrics: dict[str, Tensor] = {}
    for rows in cut:
        out = loss(data.inputs(rows, logprob))
        part = aggregate(out.loss, data.weights(rows, mode), data.totals)
        part.backward()
        value += part.detach()
        for name, metric in out.metrics.items():
            metrics[name] = metrics.get(name, torch.zeros(())) + metric.double().sum()
        for name, metric in out.shares.items():
            metrics[name] = metrics.get(name, torch.zeros(())) + (metric.double() * data.weights(rows, mode)).sum()
    assert logprob.grad is not None
    return value, logprob.grad, metrics


def check_loss_does_not_depend_on_the_cut(loss: Loss) -> None:
    """Loss, gradient and metrics are those of the uncut mini-batch, in every aggregation mode; empty parts are fine."""
    data = rollouts()
    whole, *cuts = CUTS_BETWEEN_GROUPS if "group" in loss.needs else CUTS
    for mode in MODES:
        value, gradient, metrics = _optimised(loss, data, whole, mode)
        for cut in cuts:
            other_value, other_gradient, other_metrics = _optimised(loss, data, cut, mode)
            torch.testing.assert_close(other_value, value, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(other_gradient, gradient, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(other_metrics, metrics, rtol=1e-6, atol=1e-6)


def check_loss_ignores_what_is_masked(loss: Loss) -> None:
    """[B, R] tensors with NaN and infinity under the mask give, once selected, the loss of the loss tokens alone."""
    data = rollouts()
    width = max(LENGTHS) + 2
    # Loss tokens sit behind one masked token, as after an observation.
    mask = torch.tensor([[1 <= t <= length for t in range(width)] for length in LENGTHS])
    padded = {}
    for junk, name in zip(
        (torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf),
        ("logprob", "old_logprob", "ref_logprob", "advantage", "teacher_logprob"),
        strict=True,
    ):
        padded[name] = torch.full(mask.shape, junk, dtype=torch.float64)
        padded[name][mask] = getattr(data, name)
    padded["logprob"].requires_grad_()
    clean = data.inputs(range(len(LENGTHS)))
    selected = {name: select(x, mask) for name, x in padded.items()}
    selected["top_logprob"] = top_tokens(selected["logprob"])
    out = loss(replace(clean, **selected))
    expected = loss(clean)
    torch.testing.assert_close(out.loss, expected.loss, rtol=0, atol=0)
    torch.testing.assert_close(dict(out.metrics), dict(expected.metrics), rtol=0, atol=0)
    out.loss.sum().backward()
    gradient = padded["logprob"].grad
    assert gradient is not None
    assert bool((gradient[~mask] == 0).all()), "gradient under the mask"
    assert bool(gradient.isfinite().all())


def check_no_gradient_without_advantage(loss: Loss, drift: float = 0.5) -> None:
    """Where every advantage is 0 there is nothing to learn: the gradient is exactly 0.

    A loss with a leash to the old policy keeps the law where the policy has not moved, at a ``drift`` of 0.
    """
    data = rollouts(drift=drift)
    data = replace(data, advantage=torch.zeros_like(data.advantage))
    gradient = _optimised(loss, data, CUTS[0], "token-mean")[1]
    assert bool((gradient == 0).all()), f"gradient {gradient} at zero advantage"


def check_loss_reads_only_what_it_names(loss: Loss) -> None:
    """``needs`` is the truth: with everything else absent the loss is the same."""
    optional = {"old_logprob", "advantage", "ref_logprob", "teacher_logprob", "selected", "group"}
    optional |= {"teacher_top_logprob", "top_logprob"}
    assert loss.needs <= optional, f"{loss.needs - optional} is no optional field of LossInputs"
    full = rollouts().inputs(range(len(LENGTHS)))
    lean = replace(full, **dict.fromkeys(optional - loss.needs))
    torch.testing.assert_close(loss(lean).loss, loss(full).loss, rtol=0, atol=0)


def check_loss_describes_tokens(loss: Loss) -> None:
    """One loss and one entry of each metric per loss token; metrics carry no graph; no token, no trouble."""
    data = rollouts()
    for rows in (range(len(LENGTHS)), []):
        x = data.inputs(rows, data.logprob.clone().requires_grad_())
        out = loss(x)
        assert out.loss.shape == x.logprob.shape
        assert out.loss.requires_grad, "the loss lost its graph"
        for name, metric in {**out.metrics, **out.shares}.items():
            assert metric.shape == x.logprob.shape, name
            assert not metric.requires_grad, f"metric {name} carries a graph"


def check_loss_is_finite_after_a_wild_drift(loss: Loss) -> None:
    """Log-ratios of 100 nats, which exp() cannot hold in float32, give finite losses and gradients."""
    data = rollouts()
    far = torch.full_like(data.old_logprob, 100.0)
    far[::2] *= -1
    single = {
        name: getattr(data, name).float() for name in ("old_logprob", "ref_logprob", "teacher_logprob", "advantage")
    }
    data = replace(data, logprob=(data.old_logprob + far).float(), **single)
    logprob = data.logprob.clone().requires_grad_()
    out = loss(data.inputs(range(len(LENGTHS)), logprob))
    out.loss.sum().backward()
    assert bool(out.loss.isfinite().all())
    assert logprob.grad is not None
    assert bool(logprob.grad.isfinite().all())


REWARDS = (1.0, 0.0, 0.25, 0.5, 1.0, -2.0, 0.75, 0.0)
REWARD_GROUPS = (4, 4, 1, 1, 4, 1, 9, 9)


def scored(
    rewards: Sequence[float], groups: Sequence[int], loss_tokens: Sequence[int] | None = None
) -> AdvantageInputs:
    """Responses with these rewards and groups; by default of 1, 2, 3 ... loss tokens."""
    return AdvantageInputs(
        reward=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor(groups, dtype=torch.int64),
        loss_tokens=torch.tensor(loss_tokens or range(1, len(rewards) + 1), dtype=torch.int64),
        baseline=torch.full((len(rewards),), 0.3, dtype=torch.float64),
        tokens=_token_facts(sum(loss_tokens or range(1, len(rewards) + 1)), len(rewards)),
        energy=torch.arange(sum(loss_tokens or range(1, len(rewards) + 1)), dtype=torch.float64).sin().square(),
        rollout_weight=torch.arange(sum(loss_tokens or range(1, len(rewards) + 1)), dtype=torch.float64).cos().square(),
    )


def _token_facts(num_tokens: int, num_responses: int) -> TokenValues:
    """Made-up values, charges and values after the end."""
    place = torch.arange(num_tokens, dtype=torch.float64)
    return TokenValues(place.cos(), 0.1 * place.sin(), 0.1 * torch.arange(num_responses, dtype=torch.float64))


def _rows(x: AdvantageInputs, rows: Tensor) -> AdvantageInputs:
    assert x.baseline is not None
    assert x.tokens is not None
    parts = {name: value[rows] for name, value in x.parts.items()}
    places = torch.arange(len(x.tokens.value)).split(x.loss_tokens.tolist())
    picked = torch.cat([places[i] for i in rows.tolist()])
    tokens = TokenValues(x.tokens.value[picked], x.tokens.penalty[picked], x.tokens.next_value[rows])
    assert x.energy is not None
    assert x.rollout_weight is not None
    energy, weight = x.energy[picked], x.rollout_weight[picked]
    of_responses = (x.reward[rows], x.group[rows], x.loss_tokens[rows], parts, x.baseline[rows])
    return AdvantageInputs(*of_responses, tokens, energy, weight)


def by_response(advantage: Advantage, x: AdvantageInputs) -> list[Tensor]:
    """The advantages of each response: [1], or one per loss token where the estimator gives those."""
    sizes = x.loss_tokens.tolist() if advantage.per_token else [1] * len(x.reward)
    return list(advantage(x).split(sizes))


def check_advantage_follows_its_response(advantage: Advantage) -> None:
    """Shuffling the responses shuffles the advantages, and the numbering of groups is free."""
    x = scored(REWARDS, REWARD_GROUPS)
    expected = by_response(advantage, x)
    for seed in range(3):
        order = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(seed))
        shuffled = by_response(advantage, _rows(x, order))
        torch.testing.assert_close(shuffled, [expected[i] for i in order.tolist()], rtol=1e-12, atol=1e-12)
    renamed = replace(x, group=torch.tensor([10**12, -5, 3])[torch.unique(x.group, return_inverse=True)[1]])
    torch.testing.assert_close(by_response(advantage, renamed), expected, rtol=1e-12, atol=1e-12)


def check_advantage_reads_only_what_it_names(advantage: Advantage) -> None:
    """What it does not name may be missing, and groups that it does not name may be any."""
    x = scored(REWARDS, REWARD_GROUPS)
    x = replace(x, parts={"first": x.reward, "second": x.reward.flip(0)})
    unread: dict[str, Any] = {
        "parts": {},
        "baseline": None,
        "tokens": None,
        "energy": None,
        "rollout_weight": None,
        "group": x.group.flip(0),
    }
    bare = replace(x, **{name: value for name, value in unread.items() if name not in advantage.needs})
    assert torch.equal(advantage(bare), advantage(x))


def check_unscored_responses_change_nothing(advantage: Advantage) -> None:
    """A response without a finite reward gets 0, and the others what they would get without it."""
    x = scored(REWARDS, REWARD_GROUPS)
    for junk in (torch.nan, torch.inf, -torch.inf):
        reward = x.reward.clone()
        reward[2] = junk
        out = by_response(advantage, replace(x, reward=reward))
        rest = torch.tensor([i for i in range(len(REWARDS)) if i != 2])
        assert bool((out.pop(2) == 0).all())
        torch.testing.assert_close(out, by_response(advantage, _rows(x, rest)), rtol=1e-12, atol=1e-12)


def check_advantage_is_float64_per_response(advantage: Advantage) -> None:
    """[B] float64 (or one per loss token), finite; no response, no trouble; the inputs stay as they were."""
    x = scored(REWARDS, REWARD_GROUPS)
    before = x.reward.clone()
    out = advantage(x)
    assert out.shape == ((int(x.loss_tokens.sum()),) if advantage.per_token else x.reward.shape)
    assert out.dtype == torch.float64
    assert bool(out.isfinite().all())
    assert torch.equal(x.reward, before)
    assert advantage(scored([], [])).shape == (0,)


def check_flat_and_lonely_groups_give_zero(advantage: Advantage) -> None:
    """Where a group offers no comparison the advantage is exactly 0, also for rewards that are no binary fractions."""
    x = scored([0.1, 0.1, 0.1, 0.7, 1.0, 0.0, torch.nan, 0.3], [0, 0, 0, 1, 2, 2, 3, 3])
    out = by_response(advantage, x)
    assert all(bool((part == 0).all()) for part in out[:4] + out[6:])
    assert any(bool((part != 0).any()) for part in out[4:6])
